"""The styles in which tensor parallelism divides a module, under the names of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

StyleName = str | ParallelStyle


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """A way to divide a module over the ranks of `tp`, with the exchanges before and after it."""

    name: str
    cut: Literal["outputs", "inputs", "rows", "vectors", "nothing"]
    """Outputs or inputs of a linear layer; rows or vectors of an embedding table."""
    is_gathered: bool = False
    """True if each rank gets the outputs of all ranks; else it gets its own outputs."""
    is_split: bool = False
    """True if the module receives all inputs, of which each rank takes its own."""
    parts: int = 1
    """Number of layers of equal size that are fused in the outputs."""
    is_fused_attention: bool = False
    """True for queries, keys and values, fused in this order."""
    sums_gradients: bool = False
    """True for a module that stays whole but sees divided activations."""

    @property
    def divides_outputs(self) -> bool:
        """True if each rank gets its own outputs."""
        return self.cut == "outputs" and not self.is_gathered

    @property
    def is_whole_outside(self) -> bool:
        """The module gets what it would get in one process, and returns the same."""
        return self.cut in ("rows", "vectors") or self.is_gathered or self.is_split

    @property
    def sums_inputs(self) -> bool:
        """True if each rank receives its own inputs, and the ranks sum the results."""
        return self.cut == "inputs" and not self.is_split


_ALL = (
    Style(name="colwise", cut="outputs"),
    Style(name="colwise_gather_output", cut="outputs", is_gathered=True),
    Style(name="colwise_rep", cut="outputs", is_gathered=True),
    Style(name="packed_colwise", cut="outputs", parts=2),
    Style(name="qkv_colwise", cut="outputs", is_fused_attention=True),
    Style(name="rowwise", cut="inputs"),
    Style(name="rowwise_split_input", cut="inputs", is_split=True),
    Style(name="rowwise_rep", cut="inputs", is_split=True),
    Style(name="embedding_rowwise", cut="rows"),
    Style(name="embedding_colwise", cut="vectors", is_gathered=True),
    Style(name="replicate", cut="nothing"),
    Style(name="replicated_with_grad_allreduce", cut="nothing", sums_gradients=True),
)
STYLES: Mapping[str, Style] = MappingProxyType({each.name: each for each in _ALL})
"""The styles by name. All but `qkv_colwise` have the names of a `tp_plan` of transformers."""


def style_of(pattern: str, given: StyleName) -> Style:
    """Returns a style by its name, or the equal of an object of torch.

    Raises `ValueError` for other names and objects.
    """
    name = _name_of(given) if isinstance(given, ParallelStyle) else given
    if name not in STYLES:
        other = "; 'replicate' computes the same" if name == "sequence_parallel" else ""
        raise ValueError(
            f"styles: {pattern!r}: expected one of {', '.join(STYLES)}, or ColwiseParallel() or "
            f"RowwiseParallel() of torch, got {given!r}{other}"
        )
    return STYLES[name]


def _name_of(style: ParallelStyle) -> str:
    """Returns the name of the style of an object of torch; "" if there is none."""
    whole: tuple[Placement, ...] = (Replicate(),)
    part: tuple[Placement, ...] = (Shard(-1),)
    if not isinstance(style, ColwiseParallel | RowwiseParallel) or not style.use_local_output:
        return ""
    layouts = style.input_layouts, style.output_layouts
    if isinstance(style, ColwiseParallel):
        return {(whole, part): "colwise", (whole, whole): "colwise_gather_output"}.get(layouts, "")
    return {(part, whole): "rowwise", (whole, whole): "rowwise_split_input"}.get(layouts, "")
