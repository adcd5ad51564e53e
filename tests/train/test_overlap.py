"""The overlap example of `unisono train`: predictions, real runs through the controller, and the
timeline.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from unisono.train import (
    Example,
    hidden_line,
    overlap_json,
    overlap_svg,
    overlap_trace,
    run_overlap,
)
from unisono.train.overlap import cases_of


def test_predictions_are_the_closed_forms() -> None:
    example = Example(compute_s=1.0, exchange_s=500.0)
    serial, overlapped, fused, both, best = (
        case.predicted_s(example) for case in cases_of(example)
    )
    assert (serial, overlapped) == (577_152, 576_001)
    assert (fused, both) == (313_152, 312_012)
    assert best == pytest.approx(288_504, abs=1)


def test_a_step_takes_the_wanted_time() -> None:
    for ratio in (500.0, 1.0):
        example = Example.lasting(2.0, ratio=ratio)
        assert cases_of(example)[0].predicted_s(example) == pytest.approx(2.0)
        assert example.exchange_s / example.compute_s == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", 0), ("per_layer", 0), ("compute_s", 0.0), ("exchange_s", -1.0),
     ("latency_share", 1.5)],
)  # fmt: skip
def test_wrong_settings_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}: expected"):
        Example(**{"compute_s": 1.0, "exchange_s": 1.0, field: value})  # type: ignore[arg-type]


def test_all_cases_run_and_take_no_less_than_the_link() -> None:
    example = Example.lasting(0.2, ratio=1.0, layers=4, per_layer=3)
    result = run_overlap(example, ranks=2, rounds=2)
    assert [len(each.case.ends) for each in result.cases][:4] == [12, 12, 4, 4]
    for each in result.cases:
        assert len(each.steps) == 2
        for step in each.steps:  # the program has checked the sums of the gradients
            assert step.seconds >= each.predicted_s
            assert [use.tensors for use in step.link] == [
                end - begin
                for begin, end in zip((0, *each.case.ends), each.case.ends, strict=False)
            ]
    assert result.hideable_s == pytest.approx(0.2 * 11 / 24)
    assert hidden_line(result).startswith("Overlap hid ")
    document = json.loads(json.dumps(overlap_json([result])))
    assert len(document["results"][0]["cases"]) == 5
    check_trace(json.loads(overlap_trace([result])))
    drawing = overlap_svg(result)
    assert all(f"{each.case.name}: link<" in drawing for each in result.cases)


def check_trace(trace: dict[str, list[dict[str, object]]]) -> None:
    """Checks that slices of a row do not overlap, since Perfetto rejects slices that cross."""
    rows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    assert len(rows) == 10
    for slices in rows.values():
        ordered: list[tuple[float, float]] = sorted(slices)  # type: ignore[type-var,arg-type]
        for (start, length), (following, _) in pairwise(ordered):
            assert start + length <= following + 1e-3
