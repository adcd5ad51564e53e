"""Tensor parallelism of two linear layers in an `nn.Sequential`, without changes to the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from unisono.parallel.divisible.exchanges import TensorSize, size_on_rank
from unisono.parallel.divisible.interfaces import Divisible, MicrobatchPart, attach
from unisono.parallel.layers.per_position import is_elementwise
from unisono.parallel.layers.tensor_1d import Tensor1D
from unisono.parallel.training_mesh import TrainingMesh
from unisono.torch_backend import has_hooks, own_buffers, own_children, own_parameters


class LinearPair:
    """Two linear layers: the ranks divide the outputs of the first and the inputs of the last.

    Only elementwise modules may be between the layers. All modules stay in their `nn.Sequential`
    and keep their names.
    """

    def __init__(self, first: nn.Linear, last: nn.Linear, mesh: TrainingMesh) -> None:
        """Keeps this rank's parts of both layers, and adds exchanges before and after the pair."""
        self.sums: tuple[TensorSize, TensorSize] | None = None
        """The sums over the ranks in the last pass: of the results, and of the gradients."""
        self._mesh, self._tensor, self._last = mesh, Tensor1D(mesh), last
        self._tensor.divide_first(first)
        self._tensor.divide_last(last)
        self._gradients = TensorSize(0, 0)
        first.register_forward_pre_hook(self._enter)
        last.forward = self._leave  # type: ignore[method-assign, assignment]
        attach(last, self)

    def _enter(self, _: nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (x,) = arguments
        self._gradients = size_on_rank(x, x.requires_grad)
        return (self._tensor.enter(x),)

    def _leave(self, x: torch.Tensor) -> torch.Tensor:
        part = functional.linear(x, self._last.weight)
        if torch.is_grad_enabled():  # an evaluation sums no gradients
            self.sums = size_on_rank(part), self._gradients
        y = self._tensor.leave(part)
        return y if self._last.bias is None else y + self._last.bias

    def bytes_sent(self, parts: Sequence[MicrobatchPart]) -> Mapping[str, float]:
        """Returns the bytes that this rank sends on `tp` in a step; see `Exchanging`."""
        sums = (
            self._mesh.sum_elements(elements, "tp") * item_bytes
            for elements, item_bytes in self.sums or ()
        )
        return {"tp": len(parts) * sum(sums)}


def pair_linears(model: nn.Module, mesh: TrainingMesh) -> int:
    """Divides each pair of linear layers in a model; returns the number of pairs.

    A pair is `nn.Linear`, elementwise modules and `nn.Linear` in an `nn.Sequential`. Modules with a
    method `divide` do not change, and neither do linear layers that the model also uses outside of
    the pair, or whose parameters other modules share. Layers that compute their weights, and
    modules with hooks, stay whole: these would see a part of the layer. With one rank on `tp`,
    nothing changes.
    """
    if mesh.group("tp") is None:
        return 0
    sequences = dict.fromkeys(_sequences(model))
    pairs = Counter(pair for sequence in sequences for pair in _pairs(sequence))
    uses = Counter(child for each in model.modules() for child in own_children(each).values())
    owners = Counter(each for module in model.modules() for each in own_parameters(module).values())
    alone = [
        (first, last)
        for (first, last), count in pairs.items()
        if first is not last
        and uses[first] == uses[last] == count
        and all(owners[each] == 1 for linear in (first, last) for each in linear.parameters())
    ]
    for first, last in alone:
        LinearPair(first, last, mesh)
    return len(alone)


def undivided_linear(model: nn.Module) -> str:
    """Returns words about the first module that no pair may have; "" without one."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and not _is_plain(module):
            return f" ({name} has hooks or computes its weight, as pruning and norms of weights do)"
        if is_elementwise(module) and not _is_plain(module):
            return f" ({name} has hooks)"
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            return f" ({name} is a {type(module).__name__}, not an nn.Linear)"
    return ""


def _is_plain(module: nn.Module) -> bool:
    """Returns True for a module that only computes its class's result from its own parameters."""
    known = {"weight", "bias"} if isinstance(module, nn.Linear) else set()
    has_other = set(own_parameters(module)) != known or bool(own_buffers(module))
    return not (has_other or "forward" in vars(module) or has_hooks(module))


def _sequences(module: nn.Module) -> list[nn.Sequential]:
    """Returns each `nn.Sequential` in a module, except inside modules with a method `divide`."""
    if isinstance(module, Divisible):
        return []
    found = [each for child in module.children() for each in _sequences(child)]
    is_sequence = type(module).forward is nn.Sequential.forward and "forward" not in vars(module)
    return [module, *found] if is_sequence and isinstance(module, nn.Sequential) else found


def _pairs(sequence: nn.Sequential) -> list[tuple[nn.Linear, nn.Linear]]:
    kept = [each for each in sequence if not (is_elementwise(each) and _is_plain(each))]
    found: list[tuple[nn.Linear, nn.Linear]] = []
    for first, last in pairwise(kept):
        is_free = not found or found[-1][1] is not first
        if is_free and all(type(each) is nn.Linear and _is_plain(each) for each in (first, last)):
            found.append((first, last))  # type: ignore[arg-type]
    return found
