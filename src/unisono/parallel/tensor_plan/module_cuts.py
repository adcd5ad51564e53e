"""The parts of a module's parameters that each rank of `tp` keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from unisono.division import part_of
from unisono.parallel.divisible.parameter_block import Span
from unisono.parallel.tensor_plan.attention_heads import AttentionHeads
from unisono.parallel.tensor_plan.linear_sizes import (
    bias_of,
    inputs_of,
    is_transposed,
    outputs_of,
    weight_of,
)
from unisono.parallel.tensor_plan.styles import Style
from unisono.torch_backend import has_hooks, own_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCut:
    """The ranges of a parameter along one dimension that the ranks of `tp` keep."""

    dim: int
    ranges: tuple[tuple[Span, ...], ...]
    """By rank: ranges of the whole parameter along `dim`, which the rank joins."""
    copies: int = 1
    """Number of adjacent ranks that keep the same ranges."""

    def length(self, rank: int) -> int:
        """Returns the number of indices along `dim` that a rank keeps."""
        return sum(count for _, count in self.ranges[rank])


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModule:
    """A module with its style, and the parts of its parameters that each rank keeps."""

    name: str
    layer: str
    """The name of the adapted layer that it is a part of; for others, that of the module."""
    module: nn.Module = field(repr=False)
    style: Style
    cuts: Mapping[str, ParameterCut] = field(default_factory=dict)
    """By the name of the parameter in the module."""
    local_values: Mapping[str, int] = field(default_factory=dict)
    """Attributes of the module with their values on each rank: counts of heads."""

    @property
    def around(self) -> str:
        """The name of the module around the layer."""
        return self.layer.rpartition(".")[0]

    @property
    def shares_input(self) -> bool:
        """Other layers of the module around may have the same input, as the matrices of an
        adapter have not."""
        return ".lora_" not in self.name[len(self.layer) :]


def require_kind(name: str, module: nn.Module, style: Style) -> None:
    """Raises `ValueError` for a module that a style cannot divide."""
    if style.cut == "nothing":
        return
    if style.cut in ("rows", "vectors"):
        expected, fits = "an nn.Embedding", isinstance(module, nn.Embedding)
    else:
        plain = type(module).forward is nn.Linear.forward
        expected, fits = "an nn.Linear or a Conv1D of GPT-2", plain or _is_plain_conv1d(module)
    problem = ""
    if not fits:
        kind = type(module)
        name_of_kind = kind.__name__ if kind.__name__ != "Linear" else f"{kind.__module__}.Linear"
        problem = f"is a {name_of_kind}"
    elif "forward" in vars(module) or (has_hooks(module) and not style.is_whole_outside):
        problem = "has hooks, which would see a part of the activations, or a forward of its own"
    elif set(own_parameters(module)) - {"weight", "bias"} or "weight" not in own_parameters(module):
        problem = "computes its weight, as pruning and norms of weights do"
    elif isinstance(module, nn.Embedding) and module.max_norm is not None:
        problem = "has max_norm"
    if problem:
        raise ValueError(
            f"{name}: style {style.name!r} divides {expected}, but the module {problem}; style "
            "'replicate' works"
        )


def _is_plain_conv1d(module: nn.Module) -> bool:
    weight = own_parameters(module).get("weight")
    return is_transposed(module) and weight is not None and weight.dim() == 2


def cuts_of(
    name: str, module: nn.Module, style: Style, heads: AttentionHeads | None, ranks: int
) -> dict[str, ParameterCut]:
    """Returns the cuts of a module's parameters.

    `heads`: the heads of the attention module around it. Raises `ValueError` if the ranks cannot
    divide the module.
    """
    if style.cut == "nothing" or ranks == 1:
        return {}
    if style.cut in ("rows", "vectors"):
        dim = 0 if style.cut == "rows" else 1
        return {"weight": _even(name, dim, int(weight_of(module).shape[dim]), ranks)}
    if style.cut == "inputs":
        dim = 0 if is_transposed(module) else 1
        return {"weight": _even(name, dim, inputs_of(module), ranks)}
    ranges = _output_ranges(name, outputs_of(module), style, heads, ranks)
    copies = ranges.count(ranges[0])
    dim = 1 if is_transposed(module) else 0
    found = {"weight": ParameterCut(dim=dim, ranges=tuple(ranges), copies=copies)}
    if bias_of(module) is not None:
        found["bias"] = ParameterCut(dim=0, ranges=tuple(ranges), copies=copies)
    return found


def _output_ranges(
    name: str, outputs: int, style: Style, heads: AttentionHeads | None, ranks: int
) -> list[tuple[Span, ...]]:
    if style.is_fused_attention:
        return _attention_ranges(name, outputs, heads, ranks)
    if outputs % style.parts:
        raise ValueError(
            f"{name}: style {style.name!r} needs outputs of {style.parts} layers of equal size, "
            f"got {outputs} outputs; style 'replicate' works"
        )
    if heads is not None and style.divides_outputs and style.parts == 1:
        return [(each,) for each in heads.ranges(name, outputs, ranks)]
    width = outputs // style.parts
    parts = _even_ranges(name, width, ranks)
    return [
        tuple((first + part * width, count) for part in range(style.parts))
        for first, count in parts
    ]


def _attention_ranges(
    name: str, outputs: int, heads: AttentionHeads | None, ranks: int
) -> list[tuple[Span, ...]]:
    if heads is None:
        raise ValueError(
            f"{name}: style 'qkv_colwise' needs a module with head_dim or num_heads around it, "
            "which has none; style 'replicate' works"
        )
    queries = heads.queries * heads.width
    keys, rest = divmod(outputs - queries, 2)
    if keys <= 0 or rest:
        raise ValueError(
            f"{name}: style 'qkv_colwise' needs the outputs of {heads.queries} heads of queries of "
            f"{heads.width} elements, and as many outputs for keys as for values, got {outputs} "
            "outputs; style 'replicate' works"
        )
    every = [heads.ranges(name, width, ranks) for width in (queries, keys, keys)]
    offsets = (0, queries, queries + keys)
    if len(set(every[1])) < ranks:
        raise ValueError(
            f"{name}: tp = {ranks} does not divide the {keys // heads.width} heads of keys of a "
            f"fused layer; tp = {keys // heads.width} does, and style 'replicate' works"
        )
    return [
        tuple(
            (offset + of[rank][0], of[rank][1]) for offset, of in zip(offsets, every, strict=True)
        )
        for rank in range(ranks)
    ]


def _even(name: str, dim: int, length: int, ranks: int) -> ParameterCut:
    ranges = _even_ranges(name, length, ranks)
    return ParameterCut(dim=dim, ranges=tuple((each,) for each in ranges))


def _even_ranges(name: str, length: int, ranks: int) -> Sequence[Span]:
    found = [part_of(length, rank, ranks) for rank in range(ranks)]
    if found[-1][1] <= 0:
        raise ValueError(
            f"{name}: tp = {ranks} leaves ranks without a part of {length} elements; a smaller tp "
            "and style 'replicate' work"
        )
    return found
