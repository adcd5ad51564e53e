"""The values of a model on the device meta, as its own initializers compute them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from unisono.parallel.checkpoint import TensorBlock
from unisono.parallel.meta_weights.initializer_watch import InitializerWatch, WatchedTensor
from unisono.parallel.meta_weights.memory import meta_names
from unisono.torch_backend import reset_of

_RESET_ADAPTER = "reset_lora_parameters"


class InitialValues:
    """The undivided model, without memory, whose initializers give each rank values of its part.

    An initializer is a method `init_weights`, as models of transformers have, or `reset_parameters`
    of each module, children first, as their constructors call it. All ranks draw the same numbers
    in the same order as one process, from the generator of rank 0.
    """

    def __init__(self, model: nn.Module) -> None:
        """Raises `ValueError` if the model cannot be copied."""
        self._names = meta_names(model)
        self._model: nn.Module | None = None
        if self._names:
            try:
                self._model = copy.deepcopy(model)
            except Exception as error:  # of any object in the model
                raise ValueError(
                    f"{self._names[0]}: is on the device meta, and {type(model).__name__} cannot be"
                    f" copied: {' '.join(str(error).split())}; expected a model on the CPU"
                ) from error

    @property
    def exist(self) -> bool:
        """True if the model had tensors on the device meta."""
        return bool(self._names)

    def require_equal(self) -> None:
        """Raises `ValueError` on all ranks unless the same tensors are on meta. Collective."""
        if not dist.is_initialized():
            return
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self._names)
        for rank, names in enumerate(found):
            differ = sorted(set(names) ^ set(found[0]))
            if differ:
                here, there = (0, rank) if differ[0] in found[0] else (rank, 0)
                raise ValueError(
                    f"{differ[0]}: is on the device meta on rank {here}, but has values on rank "
                    f"{there}; make the same model on all ranks"
                )

    def fill(
        self, blocks: Sequence[TensorBlock], stages: Iterable[nn.Module], *, has_file: bool
    ) -> None:
        """Computes the values of this rank's part. Collective.

        `blocks`: the parameters and persistent buffers of this rank, by their names in the model.
        `stages`: its modules, for other buffers. `has_file`: the blocks get their values from a
        file, so only other buffers are computed.

        Raises `ValueError` for tensors whose values cannot be known.
        """
        generator, shared = torch.get_rng_state(), torch.get_rng_state()
        if dist.is_initialized():
            dist.broadcast(shared, src=0)
        torch.set_rng_state(shared)
        try:
            self._fill(blocks, stages, has_file)
        finally:
            self._model = None
            if has_file or not torch.equal(generator, shared):
                torch.set_rng_state(generator)

    def _fill(
        self, blocks: Sequence[TensorBlock], stages: Iterable[nn.Module], has_file: bool
    ) -> None:
        assert self._model is not None
        saved = set(self._model.state_dict(keep_vars=True))
        watched = list(_watched(self._model, saved if has_file else set()))
        places = _places(blocks, stages)

        @torch.no_grad()
        def take(name: str, whole: torch.Tensor) -> None:
            for block in (each for other in aliases[name] for each in places.get(other, ())):
                part = zip(block.start, block.values.shape, strict=True)
                block.values.copy_(whole[tuple(slice(a, a + count) for a, count in part)])

        aliases = _aliases(self._model, watched)
        wanted = [each for each in watched if each.is_wanted]
        if not wanted:
            return
        _require_no_adapters(self._model, [each.name for each in wanted])
        watch = InitializerWatch(watched, take)
        with watch:
            _initialize(self._model)
        watch.hand_over()
        for each in wanted:
            owner = self._model.get_submodule(each.owner)
            present = getattr(owner, each.name.rpartition(".")[2])
            if (
                present is not each.tensor and not present.is_meta
            ):  # an initializer has put it there
                take(each.name, present.detach())
            elif present is not each.tensor or each.name not in watch.written:
                raise ValueError(_unknown(each, owner))


def _unknown(known: WatchedTensor, owner: nn.Module) -> str:
    kind = "parameter" if isinstance(known.tensor, nn.Parameter) else "buffer"
    cure = "weights= with a file that has it" if kind == "parameter" else "it to be made on the CPU"
    return (
        f"{known.name}: the {kind} is on the device meta, and no init_weights or reset_parameters "
        f"of {type(owner).__name__} or the modules around it sets it, so its values cannot be "
        f"known; expected {cure}"
    )


def _require_no_adapters(model: nn.Module, names: Sequence[str]) -> None:
    """Raises `ValueError` for matrices of adapters, to which peft gives values of its own."""
    layers = [name for name, each in model.named_modules() if hasattr(each, _RESET_ADAPTER)]
    for layer in layers:
        for name in names:
            if name.startswith(f"{layer}.lora_"):
                raise ValueError(
                    f"{name}: the matrix of an adapter is on the device meta, but peft gives it "
                    "values when it makes it; expected adapters on the CPU: for each layer, "
                    "layer.lora_A.to_empty(device='cpu'), the same for lora_B, and "
                    f"layer.{_RESET_ADAPTER}(name, True)"
                )


def _initialize(module: nn.Module) -> None:
    """Calls the initializers of a module: `init_weights`, or those of the children and its own."""
    whole = getattr(module, "init_weights", None)
    if callable(whole):
        _call(module, "init_weights", whole)
        return
    for child in module.children():
        _initialize(child)
    reset = reset_of(module)
    if reset is not None:
        _call(module, "reset_parameters", reset)


def _call(module: nn.Module, name: str, method: Any) -> None:
    try:
        method()
    except ValueError:
        raise
    except Exception as error:  # of the program's method
        text = " ".join(str(error).split())
        raise ValueError(
            f"weights: {type(module).__name__}.{name}() gives a model on the device meta no values:"
            f" {type(error).__name__}: {text}; expected weights= with a file, or a model on the CPU"
        ) from error


def _watched(model: nn.Module, elsewhere: set[str]) -> Iterable[WatchedTensor]:
    """Yields the tensors on meta, each once. `elsewhere`: names that get values from a file."""
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, each in named:
        if each.is_meta:
            yield WatchedTensor(
                name=name,
                owner=name.rpartition(".")[0],
                tensor=each,
                is_wanted=name not in elsewhere,
            )


def _aliases(model: nn.Module, watched: Sequence[WatchedTensor]) -> dict[str, list[str]]:
    """Returns all names of each tensor, under its first one."""
    first = {id(each.tensor): each.name for each in watched}
    found: dict[str, list[str]] = {each.name: [] for each in watched}
    for name, each in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if id(each) in first:
            found[first[id(each)]].append(name)
    return found


def _places(
    blocks: Sequence[TensorBlock], stages: Iterable[nn.Module]
) -> Mapping[str, Sequence[TensorBlock]]:
    """Returns where this rank keeps the values of each tensor."""
    found: dict[str, list[TensorBlock]] = {}
    for block in blocks:
        found.setdefault(block.name, []).append(block)
    for stage in stages:
        for name, buffer in stage.named_buffers(remove_duplicate=False):
            if name not in found:
                start, shape = (0,) * buffer.dim(), tuple(buffer.shape)
                found[name] = [TensorBlock(name=name, shape=shape, start=start, values=buffer)]
    return found
