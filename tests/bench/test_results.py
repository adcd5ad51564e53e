from __future__ import annotations

import json
from dataclasses import replace

import pytest

from unisono.bench.results import SCHEMA, Measurement, RunReport, mean_of_ratios


def test_median_and_quartiles() -> None:
    measurement = Measurement(contestant="gloo", times_s=(5.0, 1.0, 2.0, 4.0, 3.0))
    assert measurement.median_s == 3.0
    assert measurement.spread_s == (2.0, 4.0)


def test_too_few_rounds_have_no_spread() -> None:
    assert Measurement(contestant="gloo", times_s=(1.0,)).spread_s is None
    assert Measurement(contestant="gloo").median_s is None


def test_bandwidths(report: RunReport) -> None:
    row = report.rows[1]
    ours = row.measurements[0]
    assert row.algbw_Bps(ours) == pytest.approx((1 << 20) / 100e-6)
    assert row.busbw_Bps(ours) == pytest.approx(1.5 * (1 << 20) / 100e-6)


def test_ratios_and_their_geometric_mean(report: RunReport) -> None:
    assert [row.ratio("gloo", "unisono") for row in report.rows] == pytest.approx([10.0, 40.0])
    assert report.mean_ratio("gloo") == pytest.approx(20.0)
    assert report.mean_limit_ratio("unisono") == pytest.approx(2.0)
    assert report.rows[0].ratio("openmpi", "unisono") is None
    assert mean_of_ratios([None]) is None


def test_a_wrong_element_or_an_unfinished_case_of_ours_fails_the_run(report: RunReport) -> None:
    assert not report.failed
    row = report.rows[0]
    wrong = replace(row.measurements[1], wrong=1)
    assert replace(report, rows=(replace(row, measurements=(wrong,)),)).failed
    unfinished = replace(row.measurements[0], error="ended")
    assert replace(report, rows=(replace(row, measurements=(unfinished,)),)).failed
    assert replace(report, skipped={"unisono": "ended"}).failed


def test_a_peer_that_cannot_do_a_case_does_not_fail_the_run(report: RunReport) -> None:
    row = report.rows[0]
    refused = replace(row.measurements[1], error="MPI has no avg")
    assert not replace(report, rows=(replace(row, measurements=(refused,)),)).failed


def test_json_has_every_round_and_derived_numbers(report: RunReport) -> None:
    document = json.loads(json.dumps(report.to_dict()))
    assert document["schema"] == SCHEMA
    assert set(document) == {
        *(
            "schema",
            "command",
            "machine",
            "settings",
            "limit",
            "limit_from_stated_rate",
            "ours",
            "skipped",
            "rows",
        ),
        *("geometric_mean", "wrong"),
    }
    row = document["rows"][0]
    assert (row["op"], row["size_bytes"], row["count"], row["ranks"]) == ("all_reduce", 8, 2, 4)
    assert row["probes_s"] == [45e-9, 51e-9]
    ours = row["results"]["unisono"]
    assert ours["times_s"] == [2e-6, 1e-6, 3e-6]
    assert ours["time_s"] == 2e-6
    assert ours["time_over_limit"] == pytest.approx(2.0)
    assert row["results"]["gloo"]["time_over_ours"] == pytest.approx(10.0)
    assert document["geometric_mean"]["gloo"]["time_over_ours"] == pytest.approx(20.0)
