from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from faults import results as fault_results
from faults import write as write_faults
from pages.choice import render_choice, render_reproducible
from pages.faults import render_faults
from pages.hosts import render_hosts
from pages.messages import render_p2p
from pages.model_layouts import render_model_layouts
from pages.peers import render_peers
from pages.shared_arrays import render_shared_arrays
from pages.simulator import render_lab
from pages.sweeps import render_page
from pages.trees import render_trees
from pages.weight_transfer import render_weight_transfer
from write_pages import TOPICS, sections_of, write_pages

from unisono.bench.cases import Case
from unisono.bench.results import Measurement, Row, RunReport

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_rows_and_means(report: RunReport) -> None:
    report = replace(report, settings={"rounds": 7})
    page = render_page([report.to_dict()], {})
    assert "of 7 rounds" in page
    assert "## native, 4 ranks" in page
    row = "| all_reduce | 8 | 2.00 | 20.00 | 1.00 | 10.00 | 2.00 | 48 near | 0 |"
    assert row in page
    assert "Geometric mean: gloo / ours 20.00." in page


def test_bars_of_a_mode_use_only_its_rounds(report: RunReport) -> None:
    near, far = 48e-9, 200e-9
    large = replace(report.rows[0].case, ranks=2, nbytes=64 << 20)
    rounds_s = {"unisono": (9e-3, 9e-3, 20e-3, 5e-3, 7e-3), "memory": (5e-3,) * 5}
    row = replace(
        report.rows[0],
        case=large,
        measurements=tuple(Measurement(contestant=c, times_s=t) for c, t in rounds_s.items()),
        probes_s=(far, near, far, near, near),
    )
    settings = {"rounds": 5}
    page = render_page([replace(report, rows=(row,), settings=settings).to_dict()], {})
    assert "| all_reduce 64 MiB n=2, near | <= 6.9 ms | no rounds in near mode | - |" in page
    row = replace(row, probes_s=(near, near, near, far, near))
    page = render_page([replace(report, rows=(row,), settings=settings).to_dict()], {})
    assert "| all_reduce 64 MiB n=2, near | <= 6.9 ms | 9.0 ms in 2 of 5 rounds | **no** |" in page
    assert "| all_reduce 64 MiB n=2, near: over the limit | <= 1.3 | 1.80 | **no** |" in page


def test_rows_behind_a_named_peer_are_listed(report: RunReport) -> None:
    row = report.rows[0]
    times_s = {"unisono": (2e-6, 2e-6), "impi": (1e-6, 1e-6), "memory": (1e-6, 1e-6)}
    slower = replace(
        row,
        case=replace(row.case, nbytes=1 << 20),
        measurements=tuple(Measurement(contestant=c, times_s=t) for c, t in times_s.items()),
    )
    document = replace(
        report, rows=(slower,), contestants=tuple(times_s), settings={"rounds": 2}
    ).to_dict()
    document["machine"] = {"packages": {"impi": "2021.18.1"}}
    page = "\n".join(render_peers([document]))
    assert "Intel MPI 2021.18.1" in page
    assert "| impi's time over ours, geometric mean of 1 rows | >= 2 | 0.50 | **no** |" in page, (
        page
    )
    assert "| rows in which impi is faster | 0 rows | 1 rows, all_reduce 1M n=4 | **no** |" in page


def test_shared_arrays_are_held_against_the_faster_kernel(report: RunReport) -> None:
    case = replace(report.rows[0].case, nbytes=1 << 20)
    times_s = {
        "unisono-shared": (12e-6, 12e-6),
        "unisono": (30e-6, 30e-6),
        "kernels": (20e-6, 20e-6),
        "kernels-streaming": (10e-6, 10e-6),
    }
    row = replace(
        report.rows[0],
        case=case,
        measurements=tuple(Measurement(contestant=c, times_s=t) for c, t in times_s.items()),
    )
    document = replace(report, rows=(row,), settings={"rounds": 2, "rewritten": True}).to_dict()
    document["machine"] = {"packages": {}}
    page = "\n".join(render_shared_arrays({"runs": [document]}))
    kind = "input written before each call, cores near: over the limit of 1 rows"
    assert f"{kind} | <= 1.3 | 1.20 (1M) | yes |" in page
    assert "| all_reduce | 1M | 12 (12-12) | 30 (30-30) | 10.00 | 1.20 | 2.50 | 48 near |" in page


def test_many_ranks_are_compared_with_few_and_the_limit(report: RunReport) -> None:
    def page(*, limit: bool) -> str:
        rows = []
        for ranks, ours_s, memory_s in ((4, 10e-3, 8e-3), (8, 15e-3, 16e-3)):
            case = replace(report.rows[0].case, ranks=ranks, nbytes=64 << 20)
            times_s = {"unisono": ours_s, **({"memory": memory_s} if limit else {})}
            found = tuple(Measurement(contestant=c, times_s=(t,)) for c, t in times_s.items())
            rows.append(replace(report.rows[0], case=case, measurements=found))
        document = replace(report, rows=tuple(rows), settings={"rounds": 1}).to_dict()
        return render_page([document], {})

    assert "| <= 2 | 1.50 (the limit: 2.00) | yes |" in page(limit=True)
    assert "| <= 2 | 1.50 | yes |" in page(limit=False)


def test_a_page_without_measurements() -> None:
    assert "Nothing was measured yet" in render_page([], {})


def part(rails: int, ours_s: float, gloo_s: float) -> dict[str, Any]:
    """Returns a results document with one row: a call of 16 MiB between two hosts. At the limit of
    the network, the call takes 0.14 s.
    """
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


def test_several_hosts() -> None:
    documents = {
        "pairs": part(1, 0.147, 0.21),
        "wide": part(1, 0.154, 0.21),
        "one-rail": part(1, 0.15, 0.21),
        "two-rails": part(2, 0.10, 0.21),
    }
    page = render_hosts(documents)
    assert "| pairs, 16M: ours over the limit | <= 1.06 | 1.05 | yes |" in page
    assert "| wide, 16M: ours over the limit | <= 1.06 | 1.10 | **no** |" in page
    assert "| one rail's time over two rails', 16M | >= 1.9 | 1.50 | **no** |" in page
    assert "### two-rails: 2 hosts x 2 ranks, 1gbit, 2 rails" in page
    row = "| 16M | 147000 | 132300-161700 | 210000 | 140000 | 1.43 | 1.05 | 1.50 |"
    assert any(line.startswith(row) for line in page)


def messages(
    report: RunReport, ranks: int, rows: dict[tuple[str, int], tuple[float, float]]
) -> Any:
    """Returns a document of messages: our times and Open MPI's, by operation and size."""
    made = tuple(
        Row(
            case=Case(op=op, ranks=ranks, nbytes=nbytes),
            probes_s=(50e-9,),
            measurements=(
                Measurement(contestant="unisono", times_s=(ours_s,)),
                Measurement(contestant="openmpi", times_s=(theirs_s,)),
            ),
        )
        for (op, nbytes), (ours_s, theirs_s) in rows.items()
    )
    return replace(report, rows=made, contestants=("unisono", "openmpi"), skipped={}).to_dict()


def test_messages_and_their_targets(report: RunReport) -> None:
    small, large = 8, 1 << 20
    two = {
        ("ping_pong", small): (0.5e-6, 0.4e-6),
        ("ping_pong", large): (100e-6, 400e-6),
        ("stream", small): (0.2e-6, 0.3e-6),
    }
    eight = {("stream", small): (1e-6, 1.1e-6)}
    page = render_p2p({"n2": messages(report, 2, two), "n8": messages(report, 8, eight)})
    assert "Other processes used at most 0.1 cores at the start of a part." in page
    name = "half round trip, n = 2"
    mean = f"| {name}: openmpi's time over ours, geometric mean of 2 sizes | >= 1.3 | 1.79 | yes |"
    assert mean in page
    assert f"| {name}: openmpi's time over ours, worst size | >= 0.9 | 0.80 (8) | **no** |" in page
    assert f"| {name}, 8 B | < 0.6 us | 0.50 us | yes |" in page
    rate = (
        "| stream, n = 2, 8 B: messages a second over openmpi's | >= 1.3 | 1.50 (5,000,000) | yes |"
    )
    assert rate in page
    rate = "| stream, n = 8, 8 B: messages a second over openmpi's | >= 1.2 | 1.10 (4,000,000) |"
    assert f"{rate} **no** |" in page
    row = "| ping_pong | 1M | 100 | - | 400 | - | 10.5 | 10,000 | 4.00 | 50 near | 0 |"
    assert row in page


def test_memory_and_pipelines() -> None:
    load = {"messages": 48, "nbytes": 8 << 20, "hosts": 2}
    grown = {"waiting_bytes": 5 << 20, "growth_bytes": 9 << 20, "wrong": 0}
    memory = {
        "rows": [{**load, **grown}, {**load, **grown, "wrong": 3}, {**load, "error": "it hung"}]
    }
    step = {"microbatches": 8, "message_bytes": 1024, "wrong": 0}
    pipeline = {"stages": 4, "rows": [{**step, "time_s": {"unisono": 2e-3, "gloo": 1.9e-3}}]}
    page = render_p2p({"memory": memory, "pipeline": pipeline})
    name = "memory of 48 x 8M unexpected messages, 2 hosts"
    assert f"| {name} | < 16 MiB | 9.0 MiB | yes |" in page
    assert f"| {name} | < 16 MiB | 9.0 MiB | **no** |" in page  # three elements were wrong
    assert f"| {name} | < 16 MiB | it hung | **no** |" in page
    assert "| 8 | 1K | 2.00 | 1.90 | 0.95 | 0 |" in page
    name = "1F1B, 4 stages, messages of 1K: gloo's step over ours"
    assert f"| {name} | >= 1 | 0.95 | **no** |" in page


def test_times_of_calls() -> None:
    rows = [
        {"api": "torch", "call": call, "times_s": times_s, "wrong": 0}
        for call, times_s in (("send", [2e-6, 2.5e-6, 9e-6]), ("receive", [3.1e-6]))
    ]
    page = render_p2p({"calls": {"burst": 32, "rows": rows}})
    name = "of 8 B, torch: time of the call | < 3 us"
    assert f"| asynchronous send {name} | 2.50 us | yes |" in page
    assert f"| asynchronous receive {name} | 3.10 us | **no** |" in page
    assert "| torch | receive | 3.10 | 0 |" in page


def test_trees_are_compared() -> None:
    def row(ranks: int, nbytes: int, this_s: float, other_s: float, wrong: int = 0) -> Any:
        times = {"this": [this_s], "other": [other_s]}
        case = {"op": "scan", "ranks": ranks, "size_bytes": nbytes}
        return {**case, "times_s": times, "wrong": wrong}

    rows = [row(2, 8, 1.0, 1.1), row(2, 1024, 1.0, 1.0), row(4, 8, 1.0, 1.2)]
    rows.append(row(4, 1024, 1.0, 1.0, wrong=1))
    page = render_trees({"other": "abc1234", "rounds": 1, "rows": rows})
    name = "the other tree's time over this one's, geometric mean of 2 rows | >= 0.98"
    assert f"| n = 2: {name} | 1.049 | yes |" in page
    # "no" in spite of a sufficient ratio, because an element was wrong
    assert f"| n = 4: {name} | 1.095 | **no** |" in page
    assert page[-2:] == ["| 8 | 1.10 | 1.20 |", "| 1K | 1.00 | **wrong** |"]


def test_regret_and_its_targets() -> None:
    cell = {"op": "reduce", "ranks": 2, "size_bytes": 1024, "regret": 1.24}
    document = {"cells": [cell], "geometric_mean": 1.06, "worst": 1.24}
    page = render_choice(document)
    assert "| regret, geometric mean of 1 cells | <= 1.05 | 1.060 | **no** |" in page
    assert "| regret, worst cell | <= 1.3 | 1.240 | yes |" in page
    assert page[-3:] == ["| operation | ranks | 1K |", "|---|---|---|", "| reduce | 2 | 1.24 |"]


def test_a_price_is_a_median_over_rounds() -> None:
    row = {"op": "scan", "ranks": 2, "dtype": "float32", "nbytes": 1 << 20}
    times_s = {"default_s": [1.0, 2.0, 9.0], "reproducible_s": [1.1, 3.0, 9.0]}
    page = render_reproducible({"rows": [{**row, **times_s}]})
    assert "| price, worst cell | <= 1.1 | 1.10 | yes |" in page
    assert page[-1] == "| scan | 2 | float32 | 1.10 |"


def test_a_fault_that_violates_its_specification_is_marked(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    name = "test_fifty_of_fifty"
    report.write_text(
        f'<testsuites><testsuite><testcase name="{name}[cut]" time="9"/>'
        f'<testcase name="{name}[zeros]" time="8"><failure/></testcase></testsuite></testsuites>'
    )
    page = render_faults({"faults": fault_results(report)})
    assert page[-2:] == ["| cut | 50 of 50 |", "| zeros | **not all of 50** |"]


def test_faults_under_other_traffic_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text('{"faults": [{"fault": "cut", "as_specified": true}]}')
    write_faults(path, [{"fault": "zeros", "as_specified": True}])
    write_faults(path, [{"fault": "killed", "as_specified": True}])
    page = render_faults(json.loads(path.read_text()))
    assert "calls and messages of all phases are under way" in page[0]
    assert page[-2:] == ["| zeros | 50 of 50 |", "| killed | 50 of 50 |"]


def test_errors_of_the_simulator() -> None:
    rows = [
        {"hosts": "2", "algorithm": "ring", "nbytes": n << 20, "measured_s": 0.1, "error": error}
        for n, error in ((1, -0.02), (4, 0.16))
    ]
    page = render_lab(rows)
    assert "| median error of 2 rows | <= 5% | 9.0% | **no** |" in page
    assert "| worst error | <= 15% | 16.0% | **no** |" in page
    assert page[-1] == "| 2 | ring | 100 (-2.0%) | 100 (+16.0%) |"


@pytest.mark.parametrize("folder", ["", "intel"])
def test_the_pages_equal_the_results(folder: str, tmp_path: Path) -> None:
    """Tests the pages that `python benchmarks/write_pages.py` writes from the results."""
    copy = tmp_path / "results" / folder
    shutil.copytree(FOLDER / "results" / folder, copy, ignore=shutil.ignore_patterns("*.md"))
    name = "RESULTS-intel.md" if folder else "RESULTS.md"
    written = write_pages(copy, tmp_path / name)
    for path in written:
        place = path.relative_to(tmp_path)
        assert path.read_text() == (FOLDER / place).read_text(), place
    if not folder:
        assert len(written) == 1 + len(TOPICS)


def test_each_section_is_on_a_page() -> None:
    sections = sections_of(FOLDER / "results")
    on_pages = [title for topic in TOPICS.values() for title in topic.sections]
    assert sorted(sections) == sorted(on_pages)


def test_layouts_of_models_are_trained_or_refused() -> None:
    errors = {"losses": 1e-15, "norms": 2e-10, "weights": 3e-14, "refused": ""}
    rows = [
        {"model": "Llama", "layout": "tp=2", **errors},
        {"model": "ViT", "layout": "tp=2", **errors, "norms": 2e-13},
        {"model": "ViT", "layout": "cp=2", **dict.fromkeys(errors), "refused": "too short"},
        {"model": "ViT", "layout": "dp=4,cp=2", **dict.fromkeys(errors), "refused": "too short"},
    ]
    page = render_model_layouts({"transformers": "5", "rows": rows})
    assert "| largest error of losses, 2 trainings | <= 1e-10 | 1.0e-15 | yes |" in page
    assert "| largest error of norms, 2 trainings | <= 1e-10 | 2.0e-10 | **no** |" in page
    table = ["| model | tp=2 | cp=2 |", "|---|---|---|", "| Llama | 2.0e-10 |  |",
             "| ViT | 2.0e-13 | refused (1) |"]  # fmt: skip
    assert page[page.index(table[0]) :][:4] == table
    assert "| ViT | dp=4,cp=2 | refused (1) |" in page
    assert page[-1] == "1. too short"


def test_weights_are_compared_with_gloo_and_the_link() -> None:
    times_s = {"unisono": [0.5, 0.4, 0.6], "gloo": [2.0, 2.0, 2.0], "copy": [0.1, 0.2, 0.3]}
    host = {"workers": 2, "nbytes": 10**9, "tensors": 7, "times_s": times_s}
    link = {**host, "workers": 1, "gbit": 20}
    changes_s = {"same": [0.5], "joined": [0.75], "killed": [1.0]}
    document = {"turns": 3, "host": [host], "link": link, "changes_s": changes_s}
    page = "\n".join(render_weight_transfer(document))
    assert "| workers: 2; Gloo's time over ours | >= 3 | 4.00 | yes |" in page
    assert "link of 20 Gbit/s: share of the link | >= 0.95 | 0.800 | **no** |" in page
    assert "| 2 | unisono | 500 ms (400 to 600) | 2.00 |" in page
    assert "| one has joined since | 750 ms |" in page
