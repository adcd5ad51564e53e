"""Finds a smaller case with the same fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from random_models.case import Case
from random_models.judge import Verdict, judge

_PLAIN = {each.name: each.default for each in fields(Case)}
_TRIED = (
    "habit", "autocast", "resumed", "clip", "optimizer", "ignored", "example", "microbatches",
    "inputs", "container", "head", "loss", "width",
)  # fmt: skip
"""Fields that are set to their defaults, one after the other."""


def shrink(
    case: Case, verdict: Verdict, *, judged: Callable[[Case], Verdict] = judge, tries: int = 40
) -> tuple[Case, Verdict]:
    """Returns the smallest case found whose verdict has the same kind, and its verdict.

    Removes one thing at a time, and keeps each removal after which the fault remains.
    """
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(case):
            if tries == 0:
                return case, verdict
            tries -= 1
            found = judged(smaller)
            if found.kind == verdict.kind and _start(found) == _start(verdict):
                case, verdict, changed = smaller, found, True
                break
    return case, verdict


def _start(verdict: Verdict) -> str:
    """Returns the beginning of an error's text; nothing for numbers."""
    if verdict.kind.startswith("wrong") or verdict.kind in ("accepted", "hang", "death"):
        return ""
    return verdict.detail.partition(": ")[2][:24]


def _smaller(case: Case) -> Iterator[Case]:
    for place in range(len(case.blocks)):
        yield replace(case, blocks=case.blocks[:place] + case.blocks[place + 1 :])
    for name in _TRIED:
        if getattr(case, name) != _PLAIN[name]:
            yield replace(case, **{name: _PLAIN[name]})
    if len(case.batches) > 1:
        yield replace(case, batches=case.batches[:-1])
    if len(set(case.batches)) > 1:
        yield replace(case, batches=case.batches[:1] * len(case.batches))
    yield from (replace(case, layout=layout) for layout in _smaller_layouts(case.layout))


def _smaller_layouts(layout: str) -> Iterator[str]:
    parts = layout.split(",")
    for part in parts:
        name, _, value = part.partition("=")
        others = [each for each in parts if each != part]
        if name not in ("dp", "tp", "pp", "cp") or len(others) > 0:
            yield ",".join(others)
        if name in ("dp", "tp", "pp", "cp") and value == "4":
            yield ",".join([f"{name}=2", *others])
