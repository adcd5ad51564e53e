"""A plan as a table: the divided modules, and the bytes of their parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from unisono.parallel.divisible.interfaces import Divisible
from unisono.parallel.expert_stacks import ExpertStack
from unisono.parallel.precision import Precision
from unisono.parallel.tensor_plan.module_cuts import PlannedModule
from unisono.planner import Layout

_HEADER = ("module", "style", "what a rank keeps", "bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Division:
    """A module of a plan, and what rank 0 keeps of its parameters."""

    name: str
    style: str
    text: str
    module: nn.Module
    parts: Mapping[str, tuple[int, int]]
    """By the name of a divided parameter: the indices along its divided dimension that the rank
    keeps, and all of them."""
    has_rows_inside: bool = False
    """The modules inside have rows of their own."""


def plan_table(
    model: nn.Module,
    layout: Layout,
    modules: Sequence[PlannedModule],
    experts: Sequence[ExpertStack],
    precision: Precision,
) -> str:
    """Returns the table. Modules of equal names but for numbers, and equal sizes, are one row. The
    bytes are those of weights in the type of the precision."""
    divisions = [*map(_of_module, modules), *(_of_experts(each, layout) for each in experts)]
    groups: Counter[tuple[str, str, str, int, int]] = Counter()
    saved: dict[int, int] = {}  # modules may share parameters
    for each in divisions:
        own = _saved(each, precision)
        saved |= own
        whole = 0 if each.has_rows_inside else _nbytes(each.module.parameters(), precision)
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", each.name) or "the model"
        groups[name, each.style, each.text, whole, whole and whole - sum(own.values())] += 1
    rows = [
        (f"{name} x {count}", style, text, f"{whole * count:,}", f"{part * count:,}")
        for (name, style, text, whole, part), count in groups.items()
    ]
    for name, each in model.named_modules():
        whole = _nbytes(each.parameters(), precision)
        if max(layout.tp, layout.ep) > 1 and isinstance(each, Divisible):
            rows.append((name, "divide(mesh)", "as the module says", f"{whole:,}", ""))
    whole = _nbytes(model.parameters(), precision)
    rows.append(("all parameters", "", "", f"{whole:,}", f"{whole - sum(saved.values()):,}"))
    axes = [axis for axis in ("tp", "ep") if getattr(layout, axis) > 1] or ["tp"]
    header = (*_HEADER, f"on rank 0 of {' and '.join(axes)}")
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(_padded(row, widths)).rstrip() for row in (header, *rows)]
    title = f"{type(model).__name__} with {layout.text()}"
    if precision.parameters is not None:
        title += f", weights in {str(precision.parameters).removeprefix('torch.')}"
    return "\n".join([title, *lines])


def _of_module(planned: PlannedModule) -> _Division:
    parts, text = dict[str, tuple[int, int]](), list[str]()
    for name, cut in planned.cuts.items():
        parts[name] = cut.length(0), int(getattr(planned.module, name).shape[cut.dim])
        copies = f", {cut.copies} ranks the same" if cut.copies > 1 else ""
        text.append(f"{name}: {parts[name][0]} of {parts[name][1]}{copies}")
    text += [f"{name} = {value}" for name, value in planned.local_values.items()]
    return _Division(
        name=planned.name,
        style=planned.style.name,
        text="; ".join(text) or "whole",
        module=planned.module,
        parts=parts,
        has_rows_inside=bool(planned.local_values),
    )


def _of_experts(stack: ExpertStack, layout: Layout) -> _Division:
    own = stack.experts // layout.ep
    return _Division(
        name=stack.name,
        style="experts",
        text="; ".join(f"{name}: {own} of {stack.experts}" for name in stack.parameters),
        module=stack.module,
        parts=dict.fromkeys(stack.parameters, (own, stack.experts)),
    )


def _saved(division: _Division, precision: Precision) -> dict[int, int]:
    """Returns the bytes that rank 0 does not keep of each divided parameter, by its id."""
    found = {}
    for name, (kept, length) in division.parts.items():
        parameter: nn.Parameter = getattr(division.module, name)
        found[id(parameter)] = _nbytes([parameter], precision) // length * (length - kept)
    return found


def _nbytes(parameters: Iterable[nn.Parameter], precision: Precision) -> int:
    """Returns the bytes of parameters in the types in which a run keeps them."""
    kept = precision.parameters
    return sum(
        each.numel() * ((each.is_floating_point() and kept) or each.dtype).itemsize
        for each in parameters
    )


def _padded(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for place, (text, width) in enumerate(zip(row, widths, strict=True)):
        yield text.rjust(width) if place > 2 else text.ljust(width)
