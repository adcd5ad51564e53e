"""Functions that change the shape of tensors which are divided by positions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from unisono.parallel.positions.function_call import FunctionCall, Rule
from unisono.parallel.positions.sequence_part import Placement, placement_of

_CUTS = "would take some of the positions"


def reshaped(call: FunctionCall, sizes: Sequence[int]) -> Any:
    """Reshapes to the given sizes of the whole tensor, one of which may be -1."""
    before, placement, part = call.first, call.placement, call.part
    whole = call.whole_shape(before)
    target = list(sizes)
    if -1 in target:
        rest = -math.prod(target)
        target[target.index(-1)] = whole.numel() // rest if rest else 0
    outer = math.prod(whole[: placement.dim]) * placement.outer
    inner = math.prod(whole[placement.dim + 1 :]) * placement.inner
    found = _dimension(target, outer, part.length, inner)
    if found is None or math.prod(target) != whole.numel():
        call.refuse(f"from {tuple(whole)} to {tuple(sizes)} {_CUTS}")
    target[found.dim] = part.own_size(found)
    if call.name in ("view", "_unsafe_view"):
        return call.placed(call.function(before, target), found)
    return call.placed(before.reshape(target), found)


def _dimension(sizes: Sequence[int], outer: int, length: int, inner: int) -> Placement | None:
    """Returns the dimension of a new shape that has all positions.

    In memory order, the elements are `outer` x `length` positions x `inner`.

    >>> _dimension((6, 7), 2, 3, 7)
    Placement(dim=0, outer=2, inner=1)
    """
    before = 1
    for dim, size in enumerate(sizes):
        after = math.prod(sizes[dim + 1 :])
        is_whole = outer % before == 0 and after and inner % after == 0
        if is_whole and size == outer // before * length * (inner // after):
            return Placement(dim, outer // before, inner // after)
        before *= size
        if before == 0:
            break
    return None


def sizes_of(call: FunctionCall, first: int = 1) -> list[int]:
    """Returns sizes or dimensions that are passed one by one, or as a list."""
    for name in ("size", "shape", "dims", "sizes", "repeats"):
        if name in call.options:
            return list(call.options[name])
    found = call.args[first:]
    if len(found) == 1 and isinstance(found[0], (tuple, list)):
        return list(found[0])
    if not found or not all(isinstance(each, int) for each in found):
        call.refuse("is not known with these arguments")
    return list(found)


def _view(call: FunctionCall) -> Any:
    return reshaped(call, sizes_of(call))


def _view_as(call: FunctionCall) -> Any:
    shape = call.whole_shape(call.args[1])
    return call.first.reshape(shape) if placement_of(call.first) is None else reshaped(call, shape)


def _flatten(call: FunctionCall) -> Any:
    shape = list(call.whole_shape(call.first))
    start = call.option("start_dim", 1, 0) % len(shape)
    end = call.option("end_dim", 2, -1) % len(shape)
    return reshaped(call, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


def _unflatten(call: FunctionCall) -> Any:
    shape = list(call.whole_shape(call.first))
    dim = call.option("dim", 1) % len(shape)
    sizes = list(call.option("sizes", 2))
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // -math.prod(sizes)
    return reshaped(call, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def _reordered(call: FunctionCall, order: Sequence[int]) -> Any:
    """Computes a permutation of dimensions; `order`: the dimension that comes to each place."""
    return call.placed(call.run(), call.placement.at(list(order).index(call.placement.dim)))


def _transpose(call: FunctionCall) -> Any:
    order = list(range(call.first.dim()))
    dims = (call.option("dim0", 1, -2), call.option("dim1", 2, -1))
    a, b = (each % len(order) for each in dims)
    order[a], order[b] = order[b], order[a]
    return _reordered(call, order)


def _permute(call: FunctionCall) -> Any:
    return _reordered(call, [each % call.first.dim() for each in sizes_of(call)])


def _unsqueeze(call: FunctionCall) -> Any:
    dim, before = call.option("dim", 1) % (call.first.dim() + 1), call.placement.dim
    return call.placed(call.run(), call.placement.at(before + (dim <= before)))


def _squeeze(call: FunctionCall) -> Any:
    shape, placement = call.first.shape, call.placement
    dims = call.option("dim", 1, list(range(len(shape))))
    dims = [each % len(shape) for each in (dims if isinstance(dims, (tuple, list)) else [dims])]
    removed = sum(shape[each] == 1 and each < placement.dim for each in dims)
    return call.placed(call.run(), placement.at(placement.dim - removed))


def _expand(call: FunctionCall) -> Any:
    sizes = list(call.whole_shape(call.args[1])) if call.name == "expand_as" else sizes_of(call)
    if placement_of(call.first) is None:  # to the shape of a divided tensor
        return call.first.expand(sizes)
    placement = call.placement.at(call.placement.dim + len(sizes) - call.first.dim())
    if sizes[placement.dim] not in (-1, call.part.size(placement)):
        call.refuse("repeats positions")
    sizes[placement.dim] = -1
    return call.placed(call.first.expand(sizes), placement)


def _repeat(call: FunctionCall) -> Any:
    sizes = sizes_of(call)
    placement = call.placement.at(call.placement.dim + len(sizes) - call.first.dim())
    if sizes[placement.dim] != 1:
        call.refuse("repeats positions")
    return call.placed(call.run(), placement)


def _joined(call: FunctionCall) -> Any:
    """Joins tensors along another dimension than that of the positions; also a new one."""
    tensors = list(call.args[0] if call.args else call.options["tensors"])
    if call.name != "stack":  # torch leaves out empty tensors of one dimension
        tensors = [each for each in tensors if each.shape != (0,)]
    first = next(each for each in tensors if placement_of(each) is not None)
    placement, dims = placement_of(first), first.dim()
    assert placement is not None
    dim = call.option("dim", 1, call.options.get("axis", 0))
    is_new = call.name == "stack"
    dim %= dims + is_new
    if not is_new and len(tensors) > 1 and dim == placement.dim:
        call.refuse("appends positions", "use_cache=False")
    parts = [call.aligned(each, placement, dims) for each in tensors]
    after = placement.at(placement.dim + (is_new and dim <= placement.dim))
    return call.placed(call.function(parts, dim=dim), after)


def _pieces(call: FunctionCall) -> Any:
    """Cuts a tensor along another dimension than that of the positions."""
    dim = call.option("dim", 1 if call.name in ("unbind", "select", "narrow") else 2, 0)
    call.require_other(dim, _CUTS)
    placement = call.placement
    if call.name in ("unbind", "select") and dim % call.first.dim() < placement.dim:
        placement = placement.at(placement.dim - 1)
    return call.placed(call.run(), placement)


def _item(call: FunctionCall) -> Any:
    x, index = call.args
    items = list(index) if isinstance(index, tuple) else [index]
    kinds = [type(each) for each in items if each is not None and each is not ...]
    lists = [each for each in items if type(each) is list and all(type(n) is int for n in each)]
    if not set(kinds) <= {int, slice, list} or len(lists) != kinds.count(list):
        call.refuse("with this index may combine positions")
    if lists and (len(lists) > 1 or int in kinds):
        call.refuse("with this index may combine positions")
    used = sum(each is not None and each is not ... for each in items)
    rest = [slice(None)] * (x.dim() - used)
    place = items.index(...) if ... in items else len(items)
    items[place : place + 1] = rest
    placement, source, target = call.placement, 0, 0
    after = 0
    for number, each in enumerate(items):
        if each is not None and source == placement.dim:
            whole = call.part.size(placement)
            if not isinstance(each, slice) or each.indices(whole) != (0, whole, 1):
                call.refuse(_CUTS, "a model that keeps keys and values needs use_cache=False")
            items[number], after = slice(None), target
        source += each is not None
        target += not isinstance(each, int)
    return call.placed(call.function(x, tuple(items)), placement.at(after))


def _written(call: FunctionCall) -> None:
    """Writes into a part of a tensor that has all positions."""
    x, index, value = call.args
    if placement_of(x) is None:
        call.refuse("writes a part of the positions into a whole tensor")
    read = replace(call, function=torch.Tensor.__getitem__, args=(x, index))
    view = _item(read)
    placement = placement_of(view)
    assert placement is not None
    if any(type(each) is list for each in (index if isinstance(index, tuple) else [index])):
        call.refuse("is not known with these arguments")
    if isinstance(value, torch.Tensor):
        view.copy_(call.aligned(value, placement, view.dim()))
    else:
        view.fill_(value)


def _pad(call: FunctionCall) -> Any:
    sizes = list(call.option("pad", 1))
    from_last = call.first.dim() - 1 - call.placement.dim
    if any(sizes[2 * from_last : 2 * from_last + 2]):
        call.refuse("adds positions")
    return call.placed(call.run(), call.placement)


def _repeat_interleave(call: FunctionCall) -> Any:
    call.require_other(call.option("dim", 2), "repeats positions")
    if not isinstance(call.args[1] if len(call.args) > 1 else call.options["repeats"], int):
        call.refuse("is not known with these arguments")
    return call.placed(call.run(), call.placement)


SHAPE_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(("view", "reshape", "_unsafe_view"), _view),
        **dict.fromkeys(("view_as", "reshape_as"), _view_as),
        "flatten": _flatten,
        "unflatten": _unflatten,
        **dict.fromkeys(("transpose", "swapaxes", "swapdims", "mT", "T", "t"), _transpose),
        "permute": _permute,
        "unsqueeze": _unsqueeze,
        "squeeze": _squeeze,
        **dict.fromkeys(("expand", "expand_as"), _expand),
        **dict.fromkeys(("repeat", "tile"), _repeat),
        **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _joined),
        **dict.fromkeys(
            ("chunk", "split", "tensor_split", "split_with_sizes", "unsafe_chunk", "unsafe_split",
             "unbind", "select", "narrow"),
            _pieces,
        ),
        "__getitem__": _item,
        "__setitem__": _written,
        "pad": _pad,
        "repeat_interleave": _repeat_interleave,
    }
)  # fmt: skip
"""The rule of each function, by its name."""
