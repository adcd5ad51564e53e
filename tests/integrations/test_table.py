"""The table of docs/frameworks.md: equal losses, times only of a quiet machine, and failures."""

from __future__ import annotations

import pytest
from frameworks import FRAMEWORKS
from table import QUIET, write_table

FRAMEWORK = next(each for each in FRAMEWORKS if each.note)


def row(tmp_path, others, losses=(2.0, 1.0), crashes=0, framework=FRAMEWORK):
    """Returns the cells of the row of a framework with these results."""
    over_gloo = {"losses": [2.0, 1.0], "step_ms": [10.0, 20.0, 30.0], "crashes": crashes}
    over_unisono = {"losses": list(losses), "step_ms": [5.0, 10.0, 15.0]}
    ranks = {"2": {"torch": over_gloo, "unisono": over_unisono, **others}}
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- integrations: begin -->\nold\n<!-- integrations: end -->\nafter\n"
    )
    results = {framework.name: {"version": "1.2", "ranks": ranks}}
    write_table(page, results, FRAMEWORKS)
    before, *table, after = page.read_text().splitlines()
    assert (before, after, len(table)) == ("before", "after", 5)
    return [cell.strip() for cell in table[3].strip("|").split("|")]


def test_a_quiet_machine_has_times(tmp_path):
    name, version, ranks, lines, losses, gloo, ours, faster, note = row(tmp_path, {"busy": 0.3})
    assert (name, version, ranks) == (FRAMEWORK.name, "1.2", "2")
    assert (lines, losses, note) == (str(FRAMEWORK.lines_changed), "equal", FRAMEWORK.note)
    assert gloo.startswith("20.00 (") and ours.startswith("10.00 (") and faster == "2.00"


@pytest.mark.parametrize("others", [{}, {"busy": QUIET}, {"busy": 90.0}])
def test_a_busy_machine_has_no_times(tmp_path, others):
    assert row(tmp_path, others)[4:8] == ["equal", "machine was busy", "machine was busy", ""]


def test_a_difference_of_losses_and_crashes_are_stated(tmp_path):
    cells = row(tmp_path, {"busy": 0.0}, losses=(2.0, 1.001), crashes=2)
    assert cells[4] == "within 1e-03"
    assert cells[-1].endswith("runs over Gloo that crashed and were repeated: 2")


def test_tokens_are_equal_or_not(tmp_path):
    of_tokens = next(each for each in FRAMEWORKS if each.compares == "tokens")
    for tokens, text in ((2.0, 1.0), "equal tokens"), ((2.0, 3.0), "other tokens"):
        assert row(tmp_path, {}, losses=tokens, framework=of_tokens)[4] == text
