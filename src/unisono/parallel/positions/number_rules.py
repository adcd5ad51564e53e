"""Functions that compute numbers from tensors which are divided by positions."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from unisono.parallel.positions.function_call import FunctionCall, Rule, tensors_of
from unisono.parallel.positions.sequence_part import Placement, placement_of
from unisono.parallel.positions.shape_rules import sizes_of

_EAGER = 'attn_implementation="sdpa", or torch\'s scaled_dot_product_attention, works'


_UNTAGGED = ("floor_divide", "selu", "relu6", "softsign", "tanhshrink", "logsigmoid", "square",
             "hardswish", "hardsigmoid", "mish", "celu", "true_divide", "divide", "multiply",
             "subtract", "isclose", "copy")  # fmt: skip
"""Elementwise functions that torch does not tag."""


@functools.cache
def is_elementwise_function(name: str) -> bool:
    """Returns True for a function of torch that computes each element alone, after broadcasting.

    >>> [is_elementwise_function(name) for name in ("gelu", "add_", "cumsum", "unknown")]
    [True, True, False, False]
    """
    if name.rstrip("_") in _UNTAGGED:
        return True
    packet = getattr(torch.ops.aten, name.rstrip("_"), None)
    kinds = [] if packet is None else packet.overloads()
    return any(torch.Tag.pointwise in getattr(packet, kind).tags for kind in kinds)


def elementwise(call: FunctionCall) -> Any:
    """Computes an elementwise function, with each rank's parts of whole arguments."""
    tensors = list(tensors_of((*call.args, *call.options.values())))
    divided = next(each for each in tensors if placement_of(each) is not None)
    placement, dims = placement_of(divided), divided.dim()
    assert placement is not None
    changes_first = call.name.endswith("_") and not call.name.endswith("__")
    if (changes_first and placement_of(call.first) is None) or "out" in call.options:
        call.refuse("writes a part of the positions into a whole tensor")

    def part(each: Any) -> Any:
        if isinstance(each, (tuple, list)):
            return type(each)(map(part, each))
        return call.aligned(each, placement, dims) if isinstance(each, torch.Tensor) else each

    options = {name: part(each) for name, each in call.options.items()}
    found = call.function(*map(part, call.args), **options)
    if not isinstance(found, torch.Tensor):
        call.refuse("is not known with these arguments")
    return call.placed(found, placement.at(placement.dim - dims + found.dim()))


def _product(call: FunctionCall) -> Any:
    """Computes a matrix product that does not sum over positions."""
    left, right = call.args[:2] if len(call.args) > 1 else (call.args[0], call.options["other"])
    if call.name == "__rmatmul__":
        left, right = right, left
    first, second = placement_of(left), placement_of(right)
    if first is not None and second is not None:
        is_of_samples = second.dim < right.dim() - 2
        if is_of_samples and first.at(first.dim - left.dim() + right.dim()) == second:
            return call.placed(call.run(), first)
        if first.dim != left.dim() - 2 or is_of_samples:
            call.refuse("combines positions", _EAGER)
        # scores of queries with all keys, or the sum of all values
        (right,), second = call.gathered(right), None
    if first is not None:
        return _left_product(call, left, right, first)
    assert second is not None
    column = second.dim == right.dim() - 1 and right.dim() > 1
    if not column:
        call.refuse("sums over positions" if second.dim >= right.dim() - 2 else _UNKNOWN)
    out = torch.matmul(left, right)
    return call.placed(out, second.at(out.dim() - 1))


_UNKNOWN = "is not known with these dimensions"


def _left_product(
    call: FunctionCall, left: torch.Tensor, right: torch.Tensor, placement: Placement
) -> Any:
    if placement.dim == left.dim() - 1:
        call.refuse("sums over positions", _EAGER)
    is_row = placement.dim == left.dim() - 2
    if not is_row and right.dim() > 2:
        right = call.aligned(right, placement, left.dim())
    out = torch.matmul(left, right)
    from_last = left.dim() - placement.dim - (right.dim() == 1)
    return call.placed(out, placement.at(out.dim() - from_last))


def _sum_with_products(call: FunctionCall) -> Any:
    """Computes `baddbmm`: a tensor plus products of matrices, with factors."""
    bias, left, right = (call.option(name, n) for n, name in enumerate(("", "batch1", "batch2")))
    factors = call.option("beta", 3, 1), call.option("alpha", 4, 1)
    product = _product(replace(call, args=(left, right), options={}))
    placement = placement_of(product)
    assert placement is not None
    bias = call.aligned(bias, placement, product.dim())
    return call.placed(factors[0] * bias + factors[1] * product, placement)


def _sum_with_product(call: FunctionCall) -> Any:
    """Computes `addmm`: a vector plus a product of matrices."""
    bias, left, right = call.args[:3]
    placement = placement_of(left)
    others = placement_of(bias) is not None or placement_of(right) is not None
    if others or placement is None or placement.dim != 0 or bias.dim() > 1:
        call.refuse(_UNKNOWN)
    return call.placed(call.run(), placement)


def _normalized(call: FunctionCall) -> Any:
    """Normalizes over the last dimensions."""
    count = len(call.option("normalized_shape", 1))
    if call.placement.dim >= call.first.dim() - count:
        call.refuse("normalizes over positions")
    return call.like_first()


def _along(dim: int, what: str) -> Rule:
    """Returns the rule of a function along a dimension, which keeps all dimensions."""

    def rule(call: FunctionCall) -> Any:
        call.require_other(dim, what)
        return call.like_first()

    return rule


def _along_option(place: int, default: Any = None, what: str = "works along the positions") -> Rule:
    """Returns the rule of a function along the dimension `dim`, which keeps all dimensions.

    `place`: that of the dimension among the arguments."""

    def rule(call: FunctionCall) -> Any:
        call.require_other(call.option("dim", place, default), what)
        return call.like_first()

    return rule


def _reduced(place: int, keep: int) -> Rule:
    """Returns the rule of a function that removes dimensions.

    `place`: that of the dimensions among the arguments; `keep`: that of `keepdim`."""

    def rule(call: FunctionCall) -> Any:
        dims = call.option("dim", place)
        if isinstance(dims, torch.Tensor) or "other" in call.options:  # the larger of two tensors
            return elementwise(call)
        call.require_other(dims, "combines positions")
        placement, count = call.placement, call.first.dim()
        if not call.option("keepdim", keep, False):
            found = dims if isinstance(dims, (tuple, list)) else [dims]
            placement = placement.at(placement.dim - sum(d % count < placement.dim for d in found))
        return call.placed(call.run(), placement)

    return rule


def _by_index(call: FunctionCall) -> Any:
    """Computes `gather` and `scatter` along another dimension, with indices of each position."""
    call.require_other(call.option("dim", 1), "takes values of other positions")
    x, index = call.first, call.option("index", 2)
    others = [each for each in tensors_of((*call.args, *call.options.values())) if each.dim()]
    if any(placement_of(each) != call.placement for each in others) or index.dim() != x.dim():
        call.refuse("may combine positions")
    return call.placed(call.run(), call.placement)


def _one_hot(call: FunctionCall) -> Any:
    """Adds a dimension of classes, whose number must be known."""
    if call.option("num_classes", 1, -1) == -1:
        call.refuse("needs num_classes, since each rank sees some of the classes")
    return call.like_first()


def _rectified(call: FunctionCall) -> Any:
    """Computes `prelu`, whose weights are those of dimension 1."""
    if call.option("weight", 1).numel() > 1:
        call.require_other(1, "has weights of positions")
    return call.like_first()


def _of_first(call: FunctionCall) -> Any:
    """Computes a conversion, for which only the first argument's values count."""
    if placement_of(call.first) is None:
        return call.run()
    return call.placed(call.run(), call.placement)


def _constant(call: FunctionCall) -> Any:
    """Makes a tensor of one value, of a shape that the program states: one that is divided as the
    first argument is, if it has as many dimensions and positions there, else a whole one."""
    is_full = call.name == "new_full"
    sizes = list(call.option("size", 1)) if is_full else sizes_of(call)
    placement = call.placement
    if len(sizes) != call.first.dim() or sizes[placement.dim] != call.part.size(placement):
        return call.run()
    sizes[placement.dim] = call.part.own_size(placement)
    values = [call.option("fill_value", 2)] if is_full else []
    rest = {name: each for name, each in call.options.items() if name not in ("size", "fill_value")}
    return call.placed(call.function(call.first, sizes, *values, **rest), placement)


_REDUCED = ("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "all", "any",
            "logsumexp", "nansum", "nanmean", "median", "count_nonzero")  # fmt: skip

NUMBER_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "linear": _along(-1, "sums over positions"),
        **dict.fromkeys(("matmul", "mm", "bmm", "mv", "__matmul__", "__rmatmul__"), _product),
        "addmm": _sum_with_product,
        "baddbmm": _sum_with_products,
        **dict.fromkeys(("layer_norm", "rms_norm"), _normalized),
        **dict.fromkeys(("softmax", "log_softmax", "cumsum", "cumprod"), _along_option(1)),
        **dict.fromkeys(("glu", "sort", "argsort"), _along_option(1, -1)),
        "prelu": _rectified,
        **dict.fromkeys(("gather", "scatter", "scatter_", "scatter_add"), _by_index),
        "one_hot": _one_hot,
        "topk": _along_option(2, -1),
        "normalize": _along_option(2, 1),
        **dict.fromkeys(_REDUCED, _reduced(1, 2)),
        **dict.fromkeys(("norm", "linalg_vector_norm"), _reduced(2, 3)),
        **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _reduced(1, 3)),
        **dict.fromkeys(("dropout", "zeros_like", "ones_like", "empty_like", "full_like",
                         "rand_like", "randn_like", "view_as_real"),
                        FunctionCall.like_first),
        **dict.fromkeys(("to", "type_as", "type", "float", "double", "half", "bfloat16", "long",
                         "int", "bool", "cpu", "contiguous", "clone", "detach", "detach_",
                         "requires_grad_", "alias", "fill_", "zero_"), _of_first),
        **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), _constant),
        "new_tensor": FunctionCall.run,
        "view_as_complex": _along(-1, "joins positions"),
        # exchanges over the ranks of tp, which have the same positions
        **dict.fromkeys(("copy_to_all", "sum_of_all"), FunctionCall.like_first),
        **dict.fromkeys(("gather_copies", "keep_part"),
                        _along_option(2, what="divides positions over the ranks of tp, too")),
        "size_on_rank": FunctionCall.run,
    }
)  # fmt: skip
"""The rule of each function, by its name. Elementwise functions need none."""
