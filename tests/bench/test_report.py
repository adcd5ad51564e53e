from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from unisono.bench.link_rate import LinkRate
from unisono.bench.plot import save_plot
from unisono.bench.report import render_report
from unisono.bench.results import RunReport


def rendered(report: RunReport) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(render_report(report))
    return console.file.getvalue()  # type: ignore[attr-defined]


def line_of(text: str, contestant: str) -> list[str]:
    line = next(line for line in text.splitlines() if f"│ {contestant} " in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_a_row_in_the_terms_of_nccl_tests(report: RunReport) -> None:
    text = rendered(report)
    ours = line_of(text, "unisono")
    assert ours[:6] == ["8", "2", "float32", "sum", "unisono", "2.00"]
    assert ours[6:] == ["1.50-2.50", "0.004", "0.006", "-", "2.00", "48 near", "0"]
    assert line_of(text, "gloo")[9] == "10.00"


def test_a_report_has_means_and_skipped_contestants(report: RunReport) -> None:
    text = rendered(report)
    assert "gloo takes 20.00 x the time of unisono" in text
    assert "skipped mpich: requires: pip install 'unisono[peers]'" in text
    assert "WRONG" not in text


def test_a_report_has_the_number_of_wrong_elements(report: RunReport) -> None:
    row = report.rows[0]
    spoilt = replace(row, measurements=(replace(row.measurements[0], wrong=3),))
    assert "WRONG RESULTS: 3 elements" in rendered(replace(report, rows=(spoilt,)))


def test_an_unsupported_case_has_its_reason(report: RunReport) -> None:
    row = report.rows[0]
    refused = replace(row.measurements[1], error="MPI has no avg of float32", times_s=())
    text = rendered(replace(report, rows=(replace(row, measurements=(refused,)),)))
    assert line_of(text, "gloo")[5] == "failed"
    assert "failed gloo, all_reduce 8: MPI has no avg of float32" in text


def test_a_report_is_drawn(report: RunReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_plot(report, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_warns_about_a_busy_machine(report: RunReport) -> None:
    assert "not reliable" not in rendered(report)
    busy = replace(report, machine={**report.machine, "busy_cores": 1.7})
    assert "using 1.7 cores; these times are not reliable" in rendered(busy)


def test_a_run_over_hosts_has_the_rate_of_its_links(report: RunReport) -> None:
    row = replace(report.rows[0], link=LinkRate(rate_Bps=0.95e9 / 8))
    cluster = {"hosts": 2, "per_host": 2, "rails": 2, "rate": "1gbit", "delay": None}
    text = rendered(replace(report, rows=(row,), settings={"cluster": cluster}))
    assert "4 ranks on 2 hosts, 2 rails, links 1gbit, payload 0.950 Gbit/s" in text


def test_a_limit_from_a_stated_rate_says_so(report: RunReport) -> None:
    cluster = {"hosts": 2, "per_host": 2, "rails": 1, "rate": "1gbit", "delay": None}
    stated = LinkRate(rate_Bps=1e9 / 8, why_stated="iperf3 is not installed")
    row = replace(report.rows[0], link=stated)
    names = ("unisono", "network")
    over = replace(report, rows=(row,), settings={"cluster": cluster}, contestants=names)
    text = " ".join(rendered(over).split())
    assert "payload" not in text
    assert "at the stated rate, headers included" in text
    assert "the limit is computed from the stated rate: iperf3 is not installed" in text
    document = over.to_dict()
    assert document["limit_from_stated_rate"] == "iperf3 is not installed"
    assert document["rows"][0]["payload_Bps"] is None
    assert document["rows"][0]["stated_Bps"] == 1e9 / 8
