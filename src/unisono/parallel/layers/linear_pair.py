"""Two linear layers of any sequence of modules, divided over `tp` without a change of the model."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from unisono.parallel.divisible import Divisible
from unisono.parallel.layers.tensor_1d import Tensor1D
from unisono.parallel.training_mesh import TrainingMesh

ELEMENTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Identity)
"""Modules that may be between the two layers: they compute each element by itself."""


class LinearPair:
    """Divides the outputs of one layer and the inputs of the next, around elementwise modules.

    The modules stay in their sequence and keep their names.
    """

    def __init__(self, first: nn.Linear, last: nn.Linear, mesh: TrainingMesh) -> None:
        """Keeps this rank's parts of both layers, and exchanges at their borders."""
        tensor = Tensor1D(mesh)
        tensor.divide_first(first)
        tensor.divide_last(last)
        first.register_forward_pre_hook(lambda _, arguments: (tensor.enter(arguments[0]),))
        last.forward = lambda x: tensor.last(x, last)  # type: ignore[method-assign, assignment]


def pair_linears(model: nn.Module, mesh: TrainingMesh) -> int:
    """Divides each pair of linear layers in the sequences of a model; returns how many.

    A pair is `nn.Linear`, elementwise modules, `nn.Linear`. Modules that divide themselves are left
    alone. With one rank on `tp` nothing is done.
    """
    if mesh.group("tp") is None:
        return 0
    pairs = [pair for sequence in _sequences(model) for pair in _pairs(sequence)]
    for first, last in pairs:
        LinearPair(first, last, mesh)
    return len(pairs)


def _sequences(module: nn.Module) -> list[nn.Sequential]:
    """Returns the sequences inside a module, without those of modules that divide themselves."""
    if isinstance(module, Divisible):
        return []
    found = [each for child in module.children() for each in _sequences(child)]
    return [module, *found] if isinstance(module, nn.Sequential) else found


def _pairs(sequence: nn.Sequential) -> list[tuple[nn.Linear, nn.Linear]]:
    kept = [module for module in sequence if not isinstance(module, ELEMENTWISE)]
    found: list[tuple[nn.Linear, nn.Linear]] = []
    for first, last in pairwise(kept):
        is_free = not found or found[-1][1] is not first
        if is_free and type(first) is nn.Linear and type(last) is nn.Linear:
            found.append((first, last))
    return found
