"""Numbers of ranks on each host. Every scenario has a test in each layout. Only one of these tests
runs by default.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

LAYOUTS = [(1, 1, 1, 1), (2, 2), (3, 1)]


def layout_name(layout: Sequence[int]) -> str:
    return "+".join(map(str, layout))


def in_layouts(cases: Iterable[Any], seldom: Collection[Any] = ()) -> list[Any]:
    """Returns parameters `(case, layout)`. One layout of each case runs by default; the others are
    marked slow, as are all layouts of the cases in `seldom`.
    """
    found = []
    for number, case in enumerate(cases):
        for layout in LAYOUTS:
            often = case not in seldom and layout == LAYOUTS[number % len(LAYOUTS)]
            marks = () if often else pytest.mark.slow
            found.append(
                pytest.param(case, layout, marks=marks, id=f"{case}-{layout_name(layout)}")
            )
    return found
