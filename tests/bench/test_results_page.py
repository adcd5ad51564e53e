from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unisono.bench.results import Report

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def results_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("results_page")


def test_rows_and_means(results_page: ModuleType, report: Report) -> None:
    report = replace(report, settings={"rounds": 7})
    page = results_page.render_page([report.to_dict()], {}, {})
    assert "of 7 turns" in page
    assert "## native, 4 ranks" in page
    row = "| all_reduce | 8 | 2.00 | 20.00 | 1.00 | 10.00 | 2.00 | 48 near | 0 |"
    assert row in page
    assert "Geometric mean: gloo / ours 20.00." in page


def test_nothing_measured_yet(results_page: ModuleType) -> None:
    assert "Nothing was measured yet" in results_page.render_page([], {}, {})


def part(rails: int, ours_s: float, gloo_s: float) -> dict[str, Any]:
    """A document of one row: 16 MiB between two hosts, where the limit is 0.14 s."""
    times_s = {"unisono": ours_s, "gloo": gloo_s, "network": 0.14}
    results = {
        name: {
            "time_s": time_s,
            "spread_s": [0.9 * time_s, 1.1 * time_s],
            "time_over_ours": time_s / ours_s,
            "time_over_limit": time_s / 0.14,
            "wrong": 0,
        }
        for name, time_s in times_s.items()
    }
    cluster = {"hosts": 2, "per_host": 2, "rails": rails, "rate": "1gbit"}
    row = {"size_bytes": 16 << 20, "payload_Bps": 1.2e8, "results": results}
    return {"settings": {"cluster": cluster}, "rows": [row]}


def test_several_hosts(results_page: ModuleType) -> None:
    documents = {
        "pairs": part(1, 0.147, 0.21),
        "wide": part(1, 0.154, 0.21),
        "one-rail": part(1, 0.15, 0.21),
        "two-rails": part(2, 0.10, 0.21),
    }
    page = results_page.render_page([], {}, documents)
    assert "| pairs, 16M: ours over the limit | <= 1.06 | 1.05 | yes |" in page
    assert "| wide, 16M: ours over the limit | <= 1.06 | 1.10 | **no** |" in page
    assert "| one rail's time over two rails', 16M | >= 1.9 | 1.50 | **no** |" in page
    assert "### two-rails: 2 hosts x 2 ranks, 1gbit, 2 rails" in page
    assert "| 16M | 147000 | 132300-161700 | 210000 | 140000 | 1.43 | 1.05 | 1.50 |" in page
