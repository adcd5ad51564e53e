"""The watch over a model's calls of torch that makes passes on divided positions right."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from unisono.parallel.context import ContextAttention
from unisono.parallel.positions.attention_rule import attention
from unisono.parallel.positions.function_call import FunctionCall, Refused, Rule, tensors_of
from unisono.parallel.positions.loss_rules import LOSSES, part_of_loss
from unisono.parallel.positions.number_rules import (
    NUMBER_RULES,
    elementwise,
    is_elementwise_function,
)
from unisono.parallel.positions.sequence_part import (
    Placement,
    SequencePart,
    place,
    placement_of,
)
from unisono.parallel.positions.shape_rules import SHAPE_RULES
from unisono.torch_backend import hide_from_dynamo, is_called_by

_OPERATORS: Mapping[str, str] = MappingProxyType(
    {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "invert": "bitwise_not",
     "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "bitwise_left_shift",
     "rshift": "bitwise_right_shift"}
)  # fmt: skip
"""The functions of operators whose names differ."""
_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **SHAPE_RULES,
        **NUMBER_RULES,
        **dict.fromkeys(LOSSES, part_of_loss),
        "scaled_dot_product_attention": attention,
    }
)
_WRONG_ATTRIBUTES = ("data", "grad", "real", "imag")
_TRANSPOSED = ("T", "mT")
_READS = frozenset(
    ("dim", "ndimension", "stride", "element_size", "get_device", "register_hook", "retain_grad",
     "untyped_storage", "data_ptr", "storage_offset", "__hash__")
)  # fmt: skip
"""Methods that read nothing which depends on the division."""
_RECOMPUTING = ("recompute_fn", "backward")
"""The functions of torch.utils.checkpoint that run a part of a forward pass again. Around them, it
compares real shapes."""
_PASSES = (torch.autograd.backward, torch.autograd.grad)
"""The functions that begin a backward pass."""
_FROM_FUNCTION = "RegisterPostBackwardFunctionBackward"
"""The node of torch's `fully_shard`, which replaces the inputs of modules by equal tensors."""

Placed = WeakValueDictionary[Any, torch.Tensor]
"""Divided tensors, by where they are in memory."""


class DividedPositions(TorchFunctionMode):
    """Computes the functions of torch that a model calls, of this rank's positions.

    Enter it on each rank of the group for the same passes. Lookups of whole sequences are divided,
    and so are the results of all functions that have divided arguments. Raises `ValueError`, with
    the module, for a function that would combine positions.
    """

    def __init__(
        self,
        part: SequencePart,
        attention: ContextAttention,
        model: nn.Module,
        *,
        owns_loss: bool,
        placed: Placed | None,
    ) -> None:
        """`owns_loss`: the loss that the model computes is that of the run. `placed`: the divided
        tensors of all passes, if `fully_shard` replaces the inputs of modules."""
        super().__init__()
        self._part, self._attention, self._model = part, attention, model
        self._owns_loss, self._is_again = owns_loss, False
        self._alone: list[Placement | None] = []
        """The placement of the inputs of the modules under way that treat each position alone."""
        self._placed = placed

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes tensors that the model gets, which may be divided."""
        for each in tensors:
            if self._placed is not None and placement_of(each) is not None:
                self._placed[_memory(each)] = each

    def divide(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's positions of vectors (samples, positions, ...)."""
        placement = Placement(1)
        return place(self._part.of(whole, placement), placement)

    def enter_alone(self, module: nn.Module, values: Any) -> None:
        """Begins the forward pass of a module that treats each position alone, which is not
        watched."""
        tensors = [each for each in tensors_of(values) if each.dim()]
        if self._placed is not None:
            self._find_replaced(tensors)
        found = {placement_of(each) for each in tensors}
        if len(found) > 1 and not self._alone:
            self._refuse(
                f"{type(module).__name__} with is_per_position gets tensors whose positions are in "
                "different dimensions, or whole ones"
            )
        self._alone.append(next(iter(found), None))

    def leave_alone(self, module: nn.Module, results: Any) -> None:
        """Ends the forward pass of a module that treats each position alone."""
        placement = self._alone.pop()
        for each in tensors_of([results]):
            if placement is None or self._alone:
                continue
            sizes = each.shape[placement.dim : placement.dim + 1]
            if list(sizes) != [self._part.own_size(placement)]:
                self._refuse(
                    f"{type(module).__name__} with is_per_position returns a tensor of shape "
                    f"{tuple(each.shape)}, without the positions in dimension {placement.dim}"
                )
            place(each, placement)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Watches the parts of the forward pass that run again in the backward pass inside."""
        self._is_again = True
        try:
            with self:
                yield
        finally:
            self._is_again = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if self._alone:
            return func(*args, **options)
        if self._is_again:
            if func in _PASSES:  # torch leaves the watch out of what it calls itself
                places = [_edges(each) for each in args]
                if "inputs" in options:
                    options = options | {"inputs": _edges(options["inputs"])}
                with self:
                    return func(*places, **options)
            if not _is_recomputing():
                return func(*args, **options)
            if is_called_by(checkpoint.CheckpointFunction.backward):
                self._refuse(  # the backward pass inside would not be watched
                    "a part of the forward pass runs again with use_reentrant=True",
                    "torch.utils.checkpoint(use_reentrant=False) works",
                )
        tensors = list(tensors_of((*args, *options.values())))
        if self._placed is not None:
            self._find_replaced(tensors)
        if all(placement_of(each) is None for each in tensors):
            return self._of_whole(func, args, options)
        name = _name_of(func)
        if name in _READS or (name.lstrip("_").startswith("is_") and name != "is_nonzero"):
            return func(*args, **options)
        if getattr(func, "__name__", "") == "__get__" and name not in _TRANSPOSED:
            return self._attribute(name, func, args)
        if name in ("size", "numel", "nelement", "__len__"):
            return self._size(name, args, options)
        found = self._called(name, func, args, options)
        self.note(tensors_of([found]))
        return found

    def _called(self, name: str, func: Any, args: Any, options: dict[str, Any]) -> Any:
        call = FunctionCall(
            name=name,
            function=func,
            args=args,
            options=options,
            part=self._part,
            attention=self._attention,
            owns_loss=self._owns_loss,
        )
        rule = _RULES.get(name)
        try:
            if rule is not None:
                return rule(call)
            if is_elementwise_function(name):
                return elementwise(call)
            if func is functional.embedding:
                return _lookup(call)
            call.refuse("may combine positions")
        except Refused as refused:
            found = refused
        self._refuse(found.reason, found.cure or "dp in place of cp works")

    def _of_whole(self, func: Any, args: Any, options: dict[str, Any]) -> Any:
        """Computes a function of whole tensors. Divides the lookup of a sequence."""
        if func is functional.embedding and isinstance(args[0], torch.Tensor):
            index = args[0]
            dim = index.dim() - 1
            if dim >= 0 and index.shape[dim] == self._part.length:
                placement = Placement(dim)
                return place(func(self._part.of(index, placement), *args[1:], **options), placement)
        if func is functional.scaled_dot_product_attention and self._is_own_part(args[0]):
            self._refuse(
                "attention gets tensors whose positions are not known, for example from a scripted "
                "function"
            )
        return func(*args, **options)

    def _is_own_part(self, query: torch.Tensor) -> bool:
        """Returns True for queries that may be a part of the positions, whose placement is lost."""
        return self._part.ranks > 1 and query.shape[-2] == self._part.own

    def _refuse(self, reason: str, cure: str = "dp in place of cp works") -> NoReturn:
        raise ValueError(
            f"{self._module()}: {reason}, but cp = {self._part.ranks} divides positions over the "
            f"ranks; {cure}"
        )

    def _attribute(self, name: str, func: Any, args: Any) -> Any:
        if name == "shape":
            return self._size("size", args, {})
        if name in _WRONG_ATTRIBUTES:
            self._refuse(f"reads the attribute {name} of a tensor")
        return func(*args)

    def _size(self, name: str, args: Any, options: dict[str, Any]) -> Any:
        placement = placement_of(args[0])
        assert placement is not None
        shape = self._part.shape(args[0], placement)
        if name == "__len__":
            return shape[0]
        if name != "size":
            return shape.numel()
        dim = options.get("dim", args[1] if len(args) > 1 else None)
        return shape if dim is None else shape[dim]

    def _find_replaced(self, tensors: list[torch.Tensor]) -> None:
        """Notes the placement of tensors that `fully_shard` has put in place of others."""
        assert self._placed is not None
        for each in tensors:
            if placement_of(each) is None and type(each.grad_fn).__name__ == _FROM_FUNCTION:
                placement = placement_of(self._placed.get(_memory(each)))
                if placement is not None:
                    place(each, placement)

    def _module(self) -> str:
        """Returns the name and type of the module whose forward runs, for errors."""
        names = {id(each): name for name, each in self._model.named_modules()}
        frame = inspect.currentframe()
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in names:
                return f"{names[id(owner)] or 'the model'} ({type(owner).__name__})"
            frame = frame.f_back
        return "the model"


hide_from_dynamo(DividedPositions)  # a traced watch would not see the positions of its tensors


def _edges(values: Any) -> Any:
    """Returns where a backward pass begins or ends, in place of tensors of the graph."""
    if isinstance(values, torch.Tensor):
        return get_gradient_edge(values)
    return type(values)(map(_edges, values)) if isinstance(values, (tuple, list)) else values


def _is_recomputing() -> bool:
    """Returns True while `torch.utils.checkpoint` runs a part of a forward pass again."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name in _RECOMPUTING and code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def _lookup(call: FunctionCall) -> Any:
    call.require_whole(call.args[1:])
    return call.placed(call.run(), call.placement)


@functools.cache
def _name_of(func: Any) -> str:
    """Returns the name of a function, of the attribute that it reads, or of an operator's
    function."""
    name = str(getattr(func, "__name__", ""))
    if name == "__get__":
        return str(func.__self__.__name__)
    name = name.partition(".")[0]
    if not (name.startswith("__") and name.endswith("__")):
        return name
    inner = name[2:-2]
    if is_elementwise_function(_OPERATORS.get(inner, inner)):
        return _OPERATORS.get(inner, inner)
    kind, inner = inner[0], inner[1:]
    found = _OPERATORS.get(inner, inner)
    if kind in "ri" and is_elementwise_function(found):
        return found + "_" * (kind == "i")
    return name


def _memory(tensor: torch.Tensor) -> Any:
    """Returns where a tensor is, and its form."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
