"""The heads of an attention module, which the ranks of `tp` divide whole."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from unisono.division import nearest_divisor
from unisono.parallel.tensor_plan.adapters import inner_layer
from unisono.parallel.tensor_plan.linear_sizes import inputs_of, outputs_of
from unisono.parallel.tensor_plan.styles import Style
from unisono.planner import divides_heads

_WIDTHS = ("head_dim", "attention_head_size", "head_size", "d_head", "dim_head")
_QUERIES = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "nhead",
    "heads",
    "num_query_heads",
)
_GROUPS = ("num_key_value_groups", "n_rep")
_SUMS = ("all_head_size", "split_size", "inner_dim")
_OF_CONFIG = ("num_attention_heads", "num_key_value_heads", "hidden_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionHeads:
    """The heads of a module, of which each rank of `tp` keeps some."""

    queries: int
    width: int
    """Elements of a head."""

    @classmethod
    def of(
        cls, module: nn.Module, outputs: Sequence[int], inputs: Sequence[int]
    ) -> AttentionHeads | None:
        """Returns the heads of a module, by its attributes; None if it has no such attributes.

        `outputs`, `inputs`: the widths of its linear layers that divide their outputs, and of
        those that divide their inputs.
        """
        queries, width = _first(module, _QUERIES), _first(module, _WIDTHS)
        whole = max(inputs or outputs)
        if width is None:
            if queries is None or whole % queries:
                return None
            return cls(queries=queries, width=whole // queries)
        return cls(queries=queries or max(whole // width, 1), width=width)

    def ranges(self, name: str, outputs: int, ranks: int) -> list[tuple[int, int]]:
        """Returns the range of outputs of each rank: whole heads.

        If a layer of keys or values has fewer heads than there are ranks, several ranks keep the
        same head. Raises `ValueError` if the ranks cannot divide the heads.
        """
        heads, rest = divmod(outputs, self.width)
        if rest:
            raise ValueError(
                f"{name}: expected outputs of whole heads of {self.width} elements, got {outputs} "
                "outputs; style 'replicate' works"
            )
        self._require(name, heads, ranks)
        count = max(heads // ranks, 1) * self.width
        return [(rank * heads // ranks * self.width, count) for rank in range(ranks)]

    def _require(self, name: str, heads: int, ranks: int) -> None:
        if not divides_heads(self.queries, heads, ranks):
            of, count = ("", self.queries) if self.queries % ranks else (f" {name}:", heads)
            near = nearest_divisor(count, ranks)
            raise ValueError(
                f"{name}: tp = {ranks} does not divide the {count} heads of{of or ' queries'}; "
                f"tp = {near} does, and style 'replicate' works"
            )

    def local_values(self, module: nn.Module, key_heads: int, ranks: int) -> dict[str, int]:
        """Returns the attributes of a module that count the heads of one process, with the values
        of a rank. `key_heads`: number of heads of keys."""
        queries, keys = self.queries // ranks, max(key_heads // ranks, 1)
        whole, part = self.queries * self.width, queries * self.width
        counts = [each for each in vars(module) if "head" in each and not _is_width(each)]
        changes = [
            *((each, key_heads, keys) for each in counts),
            *((each, self.queries, queries) for each in counts),
            *((each, self.queries // key_heads, queries // keys) for each in _GROUPS),
            *((each, whole, part) for each in _SUMS),
        ]
        return {
            name: local
            for name, before, local in changes
            if _number(module, name) == before and before != local
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedAttention:
    """An attention module whose heads the ranks divide."""

    heads: AttentionHeads
    local_values: Mapping[str, int]
    """Attributes of the module with their values on each rank."""
    norms: tuple[str, ...]
    """The names of modules without a style that have one vector of the width of a head, such as
    norms of queries and keys, which see the heads of a rank."""


def attention_of(
    model: nn.Module, name: str, matches: Mapping[str, Style], ranks: int
) -> PlannedAttention | None:
    """Returns the heads of a module whose children divide their outputs; None if it has none."""
    module = model.get_submodule(name)
    own = dict(
        inner_layer(f"{name}.{key}" if name else key, each) for key, each in module.named_children()
    )
    outputs = {
        each: outputs_of(own[each])
        for each in own
        if each in matches and matches[each].divides_outputs
    }
    inputs = [inputs_of(own[each]) for each in own if each in matches and matches[each].sums_inputs]
    heads = AttentionHeads.of(module, list(outputs.values()), inputs) if outputs else None
    if heads is None:
        return None
    _require_own_sizes(name, module)
    fused = [each for each in outputs if matches[each].is_fused_attention]
    widths = [(outputs[each] - heads.queries * heads.width) // 2 for each in fused]
    key_heads = max(min(widths or outputs.values()) // heads.width, 1)
    return PlannedAttention(
        heads=heads,
        local_values=heads.local_values(module, key_heads, ranks),
        norms=tuple(
            each for each in own if each not in matches and _is_of_a_head(own[each], heads.width)
        ),
    )


def _is_of_a_head(module: nn.Module, width: int) -> bool:
    shapes = {tuple(each.shape) for each in module.parameters()}
    return shapes == {(width,)}


def _require_own_sizes(name: str, module: nn.Module) -> None:
    """Raises `ValueError` if the forward pass of a module reads sizes of the whole model from a
    configuration, which other modules share."""
    forward = inspect.unwrap(type(module).forward)
    used: Iterable[str] = getattr(getattr(forward, "__code__", None), "co_names", ())
    read = [each for each in _OF_CONFIG if each in used and _number(module, each) is None]
    if read and "config" in used:
        raise ValueError(
            f"{name}: the forward pass of {type(module).__name__} reads config.{read[0]}, which "
            "counts all ranks; expected the styles colwise_gather_output and rowwise_split_input, "
            "or 'replicate'"
        )


def _is_width(name: str) -> bool:
    return name in _WIDTHS or "dim" in name or "size" in name


def _first(module: nn.Module, names: Sequence[str]) -> int | None:
    found = (_number(module, name) for name in names)
    return next((each for each in found if each), None)


def _number(module: nn.Module, name: str) -> int | None:
    value = vars(module).get(name)
    return value if type(value) is int else None
