"""The documentation's page of algorithms matches the registry."""

from __future__ import annotations

import runpy
from pathlib import Path

from unisono.algorithms import names
from unisono.types import Op

DOCS = Path(__file__).parents[2] / "docs"


def test_the_committed_page_is_current() -> None:
    page = runpy.run_path(str(DOCS / "algorithms_page.py"))["page"]()
    assert (DOCS / "algorithms.md").read_text() == page, "run `python docs/algorithms_page.py`"
    for op in Op:
        for name in names(op):
            assert f"| `{name}`" in page
            assert f"- `{name}`: " in page
