"""Tests of tuning: the candidates, the resulting selection, and the continuation of an interrupted
run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from unisono.bench.journal import Journal, MeasuredCell
from unisono.bench.tuner import TUNABLE, TuneRequest, candidates, default_algorithm, select, tune
from unisono.commands.main import app
from unisono.selection.rules_file import load
from unisono.types import Op

MACHINE = {"cpu": "x"}
CELL = MeasuredCell(op="all_reduce", ranks=2, nbytes=64)
REQUEST = TuneRequest(ops=(Op.ALL_REDUCE, Op.BROADCAST), ranks=(2,), sizes=(64, 4096), budget_s=0.5)


@pytest.mark.parametrize("op", TUNABLE)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_default_is_always_a_candidate(op: Op, ranks: int) -> None:
    for nbytes in (8, 1 << 14, 1 << 20, 1 << 26):
        found = candidates(op, nbytes, ranks)
        assert found[0] == default_algorithm(op, nbytes, ranks)
        assert len(set(found)) == len(found) <= 5


@given(
    st.dictionaries(
        st.integers(1, 1 << 26),
        st.dictionaries(
            st.sampled_from(["direct", "one_shot", "ring", "swing"]),
            st.floats(1e-7, 1e-2),
            min_size=1,
        ),
        min_size=1,
        max_size=6,
    )
)
def test_the_choice_is_within_five_per_cent_at_every_measured_size(
    sizes: dict[int, dict[str, float]],
) -> None:
    cells = {
        MeasuredCell(op="all_reduce", ranks=2, nbytes=size): times for size, times in sizes.items()
    }
    selection = select(cells)
    for size, times_s in sizes.items():
        rule = selection.choose(Op.ALL_REDUCE, size, ranks=2)
        assert rule is not None
        assert times_s[rule.algorithm] <= min(times_s.values()) * 1.05
        assert times_s.items() <= selection.times_s(Op.ALL_REDUCE, size, 2).items()
    for size in (0, 1 << 40):  # sizes outside the measured range also have a rule
        assert selection.choose(Op.ALL_REDUCE, size, ranks=2) is not None
    assert selection.choose(Op.ALL_REDUCE, 64, ranks=3) is None


def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = Journal(path, MACHINE, resume=False)
    first = tune(REQUEST, whole)
    assert [cell for cell in REQUEST.cells if cell not in whole.cells] == []
    lines = path.read_text().splitlines()
    # the run was interrupted during this write
    path.write_text("\n".join([*lines[:3], lines[3][:20]]))
    again = Journal(path, MACHINE, resume=True)
    assert list(again.cells) == REQUEST.cells[:2]
    steps: list[str] = []
    second = tune(REQUEST, again, lambda step, share: steps.append(step))
    assert {m for m in second.measured if m.op is Op.ALL_REDUCE} == {
        m for m in first.measured if m.op is Op.ALL_REDUCE
    }
    assert not any("all_reduce" in step for step in steps)
    assert any("broadcast" in step for step in steps)
    assert Journal(path, MACHINE, resume=True).cells == again.cells
    assert Journal(path, MACHINE, resume=False).cells == {}


def test_a_foreign_or_damaged_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path, MACHINE, resume=False).add(CELL, {"direct": 1e-6})
    with pytest.raises(ValueError, match="not a journal of this machine"):
        Journal(path, {"cpu": "y"}, resume=True)
    head, line = path.read_text().splitlines()
    path.write_text("\n".join([head, "{", line]))
    with pytest.raises(ValueError, match="line 2"):
        Journal(path, MACHINE, resume=True)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("--ops", "barrier"), "barrier has only one algorithm"),
        (("--ops", "all"), "unknown operation 'all'; known: all_reduce"),
        (("-n", "1"), "at least 2 ranks"),
        (("-n", "2,5000"), "5000 ranks are too many: at most "),
        (("-n", "2,x"), "got 'x'"),
        (("--sizes", "0"), "sizes above 0"),
    ],
)
def test_tune_refuses_invalid_options(wrong: tuple[str, str], says: str, tmp_path: Path) -> None:
    words = ["tune", "--out", str(tmp_path / "s.json"), *wrong]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "150"})
    assert result.exit_code == 2
    assert says in result.output
    assert list(tmp_path.iterdir()) == []


def test_tune_writes_a_selection_that_explain_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ["-n", "2", "--ops", "scatter", "--sizes", "64", "--time-budget", "1", "--json", "-"]
    result = CliRunner().invoke(app, ["tune", *options])
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("unisono/selection-*.json")
    selection = load(path)
    assert {m.nbytes for m in selection.measured} == {64}
    result = CliRunner().invoke(app, ["explain", "scatter", "64", "-n", "2", "--json", "-"])
    assert result.exit_code == 0, result.output
    explanation = json.loads(result.stdout)
    assert explanation["algorithm"] == selection.rules[0].algorithm
    assert explanation["source"] == f"tuned file, {path}"
    assert explanation["time"]["measured_s"] > 0
