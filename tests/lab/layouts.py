"""Numbers of ranks per host: every scenario runs in every layout, by default in one of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

LAYOUTS = [(1, 1, 1, 1), (2, 2), (3, 1)]


def layout_name(layout: Sequence[int]) -> str:
    return "+".join(map(str, layout))


def in_layouts(cases: Iterable[Any], seldom: Collection[Any] = ()) -> list[Any]:
    """Returns parameters `(case, layout)`. All but one layout of a case are slow, and so are all of
    `seldom`."""
    found = []
    for number, case in enumerate(cases):
        for layout in LAYOUTS:
            often = case not in seldom and layout == LAYOUTS[number % len(LAYOUTS)]
            marks = () if often else pytest.mark.slow
            found.append(
                pytest.param(case, layout, marks=marks, id=f"{case}-{layout_name(layout)}")
            )
    return found
