"""A plan as a table: the divided modules, and the bytes of their parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from unisono.parallel.divisible.interfaces import Divisible
from unisono.parallel.expert_stacks import ExpertStack
from unisono.parallel.precision import Precision
from unisono.parallel.tensor_plan.module_cuts import PlannedModule
from unisono.planner import Layout

_HEADER = ("module", "style", "what a rank keeps", "bytes")


def plan_table(
    model: nn.Module,
    layout: Layout,
    modules: Sequence[PlannedModule],
    experts: Sequence[ExpertStack],
    precision: Precision,
) -> str:
    """Returns the table. Modules of equal names but for numbers, and equal sizes, are one row. The
    bytes are those of weights in the type of the precision."""
    groups: Counter[tuple[str, str, str, int, int]] = Counter()
    for each in modules:
        groups[_pattern(each.name), each.style.name, _text(each), *_bytes(each, precision)] += 1
    for stack in experts:
        groups[_pattern(stack.name), "experts", *_of_experts(stack, layout, precision)] += 1
    rows = [
        (f"{name or 'the model'} x {count}", style, text, _number(whole * count),
         _number(part * count))
        for (name, style, text, whole, part), count in groups.items()
    ]  # fmt: skip
    rows += _of_themselves(model, layout, precision)
    whole = _all_bytes(model, precision)
    saved = _saved(modules, precision) | _saved_experts(experts, layout, precision)
    kept = whole - sum(saved.values())
    rows.append(("all parameters", "", "", _number(whole), _number(kept)))
    axes = [axis for axis in ("tp", "ep") if getattr(layout, axis) > 1] or ["tp"]
    header = (*_HEADER, f"on rank 0 of {' and '.join(axes)}")
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(_padded(row, widths)).rstrip() for row in (header, *rows)]
    title = f"{type(model).__name__} with {layout.text()}"
    if precision.parameters is not None:
        title += f", weights in {str(precision.parameters).removeprefix('torch.')}"
    return "\n".join([title, *lines])


def _of_themselves(
    model: nn.Module, layout: Layout, precision: Precision
) -> Iterator[tuple[str, str, str, str, str]]:
    for name, each in model.named_modules():
        whole = _all_bytes(each, precision)
        if max(layout.tp, layout.ep) > 1 and isinstance(each, Divisible):
            yield name, "divide(mesh)", "as the module says", _number(whole), ""


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _text(planned: PlannedModule) -> str:
    """Returns words about what a rank keeps of a module."""
    found = [
        f"{name}: {cut.length(0)} of {_length(planned, name)}"
        + (f", {cut.copies} ranks the same" if cut.copies > 1 else "")
        for name, cut in planned.cuts.items()
    ]
    found += [f"{name} = {value}" for name, value in planned.local_values.items()]
    return "; ".join(found) or "whole"


def _length(planned: PlannedModule, name: str) -> int:
    parameter: nn.Parameter = getattr(planned.module, name)
    return int(parameter.shape[planned.cuts[name].dim])


def _all_bytes(module: nn.Module, precision: Precision) -> int:
    return sum(_nbytes(each, precision) for each in module.parameters())


def _nbytes(parameter: nn.Parameter, precision: Precision) -> int:
    """Returns the bytes of a parameter in the type in which a run keeps it."""
    kept = precision.parameters if parameter.is_floating_point() else None
    return parameter.numel() * (kept or parameter.dtype).itemsize


def _bytes(planned: PlannedModule, precision: Precision) -> tuple[int, int]:
    """Returns the bytes of the parameters of a module with a style, in all and on rank 0."""
    if planned.local_values:  # a module around others, which have rows of their own
        return 0, 0
    whole = _all_bytes(planned.module, precision)
    return whole, whole - sum(_saved([planned], precision).values())


def _saved(modules: Sequence[PlannedModule], precision: Precision) -> dict[int, int]:
    """Returns the bytes of parameters that rank 0 of `tp` does not keep, by the parameters' ids.

    Modules may share parameters.
    """
    found: dict[int, int] = {}
    for each in modules:
        for name, cut in each.cuts.items():
            parameter: nn.Parameter = getattr(each.module, name)
            length = parameter.shape[cut.dim]
            nbytes = _nbytes(parameter, precision) // length
            found[id(parameter)] = nbytes * (length - cut.length(0))
    return found


def _of_experts(stack: ExpertStack, layout: Layout, precision: Precision) -> tuple[str, int, int]:
    """Returns words about what a rank keeps, and the bytes in all and on a rank."""
    own = f"{stack.experts // layout.ep} of {stack.experts}"
    whole = _all_bytes(stack.module, precision)
    saved = sum(_saved_experts([stack], layout, precision).values())
    return "; ".join(f"{name}: {own}" for name in stack.parameters), whole, whole - saved


def _saved_experts(
    experts: Sequence[ExpertStack], layout: Layout, precision: Precision
) -> dict[int, int]:
    """Returns the bytes of parameters that a rank of `ep` does not keep, by the parameters' ids."""
    found: dict[int, int] = {}
    for stack in experts:
        for name in stack.parameters:
            parameter: nn.Parameter = getattr(stack.module, name)
            nbytes = _nbytes(parameter, precision)
            found[id(parameter)] = nbytes - nbytes // layout.ep
    return found


def _number(value: int) -> str:
    return f"{value:,}"


def _padded(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for place, (text, width) in enumerate(zip(row, widths, strict=True)):
        yield text.rjust(width) if place > 2 else text.ljust(width)
