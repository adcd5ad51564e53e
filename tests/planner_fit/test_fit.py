"""The command that fits everything: its tables, and the shipped constants."""

from __future__ import annotations

from pathlib import Path

import fit
import numpy as np
import pytest
from constant_fit import ConstantFit
from error_tables import errors_markdown
from left_out_errors import left_out_sources
from published_runs import published_runs, thinned

from unisono.planner.constants.calibrated_constants import constants_document


def test_the_page_has_a_line_for_each_source() -> None:
    page = fit.PAGE.read_text(encoding="utf-8")
    sources = list(dict.fromkeys(run.source for run in published_runs()))
    assert all(f"\n| {source} | " in page for source in sources)
    assert f"mean of the {len(sources)} sources | {len(published_runs())} |" in page
    for name, entry in constants_document()["constants"].items():
        if entry.get("width"):
            assert f"\n| {name} | {entry['value']:.3g} |" in page, name


def test_tables_are_replaced(tmp_path: Path) -> None:
    """Tests three sources, each of which is predicted without it."""
    names = ("arXiv 2205.05198 table 5", "arXiv 2104.04473 table 1", "MT-NLG 530B")
    runs = [run for run in published_runs() if run.source in names]
    found = ConstantFit(runs, constants_document())
    sources = left_out_sources(found, runs)
    assert [each.name for each in sources] == list(dict.fromkeys(run.source for run in runs))
    for each in sources:
        values = found.constants(left_out=each.name)
        assert each.constants.changed(sigma=values.sigma) == values
        ratio = each.predictions[0].step_s / each.runs[0].measured_s
        assert each.ratios[0] == ratio and each.bias == pytest.approx(-np.log(each.ratios).mean())
    table = errors_markdown(
        sources, {each.name: 0.5 for each in sources}, {each.name: None for each in sources}
    )
    assert table.count("\n") == 2 + len(sources) and "| 50.0 % |" in table
    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks <!-- table: errors -->"):
        fit.replace_table(page.read_text(), "errors", table)
    text = "a\n<!-- table: errors -->\nold\n<!-- end -->\nb\n"
    expected = f"a\n<!-- table: errors -->\n{table}\n<!-- end -->\nb\n"
    assert fit.replace_table(text, "errors", table) == expected


@pytest.mark.slow
def test_the_shipped_constants_are_those_of_the_fit() -> None:
    runs = published_runs()
    found = ConstantFit(thinned(runs, fit.LARGEST), constants_document())
    for name, value in found.values().items():
        if not name.startswith("sigma/"):
            shipped = constants_document()["constants"][name]["value"]
            assert value == pytest.approx(shipped, rel=0.02), name
    sources = left_out_sources(found, runs)
    assert np.mean([each.error for each in sources]) < 0.125
    assert 0.75 < np.mean([each.covered for each in sources]) < 0.9
