from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from unisono.bench.results import Report

PAGE = Path(__file__).parents[2] / "benchmarks" / "results_page.py"


@pytest.fixture
def results_page() -> ModuleType:

    spec = importlib.util.spec_from_file_location("results_page", PAGE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["results_page"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_rows_and_means(results_page: ModuleType, report: Report) -> None:
    page = results_page.render_page([report.to_dict()], {})
    assert "## native, 4 ranks" in page
    row = "| all_reduce | 8 | 2.00 | 20.00 | 1.00 | 10.00 | 2.00 | 48 near | 0 |"
    assert row in page
    assert "Geometric mean: gloo / ours 20.00." in page


def test_nothing_measured_yet(results_page: ModuleType) -> None:
    assert "Nothing was measured yet" in results_page.render_page([], {})
