"""Rates of links, derived from measured collectives: known rates are recovered from files of all
kinds.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.step_times.exchange_times import ExchangeTimes, GroupPlace

CLUSTER = planner.Cluster.parse("a100:16")
SIZES = [1 << power for power in range(12, 31)]
HIDDEN = default_constants().changed(
    link_share=0.55, link_start_s=2e-5, link_rank_s=2e-6, network_share=0.4, network_start_s=9e-5
)


def ring_s(nbytes: float, ranks: int, hosts: int) -> float:
    """Returns the seconds of an all_reduce on a simulated machine with the hidden constants."""
    group = GroupPlace(ranks, ranks // hosts, 1)
    return ExchangeTimes(CLUSTER, HIDDEN).all_reduce_s(nbytes, group)


def nccl_tests(ranks: int, hosts: int, outlier: float = 1.0) -> str:
    """Returns an output of nccl-tests for a simulated machine with the hidden constants."""
    lines = [f"# all_reduce_perf -b 4K -e 1G -f 2 -g {ranks}"]
    for rank in range(ranks):
        host = f"node{rank * hosts // ranks}"
        lines.append(
            f"#  Rank {rank:2d} Group  0 Pid {rank} on  {host} device  0 [0x07] NVIDIA A100"
        )
    for number, nbytes in enumerate(SIZES):
        seconds = ring_s(nbytes, ranks, hosts) * (outlier if number % 5 == 0 else 1.0)
        lines.append(f"{nbytes} {nbytes // 4} float sum -1 {seconds * 1e6:.3f} 1.0 1.0 0 1 1 1 0")
    return "\n".join(lines)


def test_hidden_rates_are_found(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(nccl_tests(8, 1))
    (tmp_path / "two.txt").write_text(nccl_tests(16, 2))
    made = planner.calibrate([tmp_path / "one.txt", tmp_path / "two.txt"], cluster=CLUSTER)
    found = made.with_links(CLUSTER, default_constants())
    shipped = default_constants()
    exchanges = [ExchangeTimes(CLUSTER, each) for each in (found, HIDDEN)]
    for group in (GroupPlace(8, 8, 1), GroupPlace(16, 8, 1)):
        for nbytes in (1e5, 1e7, 1e9):
            times = [each.all_reduce_s(nbytes, group) for each in exchanges]
            assert times[0] == pytest.approx(times[1], rel=0.02)
    assert found.link_share == pytest.approx(0.55, rel=0.01)
    assert found.network_share == pytest.approx(0.4, rel=0.01)
    ratio = found.exchange_share / shipped.exchange_share
    assert ratio == pytest.approx(found.network_share / shipped.network_share)
    layout = planner.Layout(dp=2, tp=8, zero=1)
    job = planner.Workload(seq=2048, global_batch=32, micro_batch=1, recompute="full")
    model = planner.load_model("gpt3-7.5b")
    known = planner.predict(model, CLUSTER, layout, job, calibration=made)
    hidden = planner.predict(model, CLUSTER, layout, job, constants=HIDDEN)
    assert known.time["tensor"] == pytest.approx(hidden.time["tensor"], rel=0.02)


@pytest.mark.parametrize("outlier", [10.0, 0.2])
def test_outliers_do_not_matter(tmp_path: Path, outlier: float) -> None:
    (tmp_path / "one.txt").write_text(nccl_tests(8, 1, outlier=outlier))
    (link,) = planner.calibrate([tmp_path / "one.txt"], cluster=CLUSTER).links
    assert (link.place, link.samples) == ("domain", 15)
    assert link.share == pytest.approx(0.55, rel=0.02)


def test_own_benchmark(tmp_path: Path) -> None:
    """Tests that a file of `unisono bench --json` gives the rate of the network if the benchmark
    had 8 ranks, more than the 4 devices of a domain.
    """
    small = replace(CLUSTER, per_host=4)
    rows = [
        {
            "op": "all_reduce",
            "ranks": 8,
            "size_bytes": nbytes,
            "results": {"unisono": {"time_s": 1e-4 + 2 * nbytes * 7 / 8 / 1e10}},
        }
        for nbytes in SIZES
    ]
    (tmp_path / "bench.json").write_text(json.dumps({"rows": rows}))
    (link,) = planner.calibrate([tmp_path / "bench.json"], cluster=small).links
    assert link.place == "network"
    assert link.share * small.between_Bps * 4 == pytest.approx(1e10, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "place"),
    [({}, "domain"), ({"cluster": {"hosts": 2}}, "network"), (None, "network")],
)
def test_hosts_of_a_benchmark(tmp_path: Path, settings: object, place: str) -> None:
    """Tests that our benchmark's number of hosts is used if given, and otherwise the number of
    devices in a domain.
    """
    small = replace(CLUSTER, per_host=4)
    rows = [
        {
            "op": "all_gather",
            "ranks": 8,
            "size_bytes": n,
            "results": {"unisono": {"time_s": n / 1e9}},
        }
        for n in SIZES
    ]
    (tmp_path / "bench.json").write_text(json.dumps({"rows": rows, "settings": settings}))
    (link,) = planner.calibrate([tmp_path / "bench.json"], cluster=small).links
    assert link.place == place


def test_a_device_whose_rates_are_measured_again(tmp_path: Path) -> None:
    """Tests that a calibration stores the measured rate of a link itself. A ratio to the device's
    rate would not do, since the rate of "CPU", for example, is measured again in each process.
    """
    (tmp_path / "one.txt").write_text(nccl_tests(8, 1))
    made = planner.calibrate([tmp_path / "one.txt"], cluster=CLUSTER)
    again = replace(CLUSTER, device=replace(CLUSTER.kind, link_Bps=2 * CLUSTER.kind.link_Bps))
    group = GroupPlace(8, 8, 1)
    first, second = (
        ExchangeTimes(each, made.with_links(each, default_constants())) for each in (CLUSTER, again)
    )
    assert first.all_reduce_s(1e9, group) == pytest.approx(second.all_reduce_s(1e9, group))
    faster = ExchangeTimes(
        replace(CLUSTER, link_Bps=2 * CLUSTER.domain_Bps),
        made.with_links(CLUSTER, default_constants()),
    )
    assert faster.all_reduce_s(1e9, group) < 0.6 * first.all_reduce_s(1e9, group)


def test_other_devices_keep_their_rates(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(nccl_tests(8, 1))
    made = planner.calibrate([tmp_path / "one.txt"], cluster=CLUSTER)
    default = default_constants()
    assert made.with_links(planner.Cluster.parse("h100:8"), default) is default


@pytest.mark.parametrize(
    ("text", "cluster", "message"),
    [
        (nccl_tests(8, 1), None, "collectives need the cluster"),
        ('{"rows": []}', CLUSTER, "found none of them"),
        ("# all_reduce_perf", CLUSTER, "found no line with a size"),
        ("hello", CLUSTER, "found none"),
        ("a,b\n1,2\n", CLUSTER, "expected runs with model"),
    ],
)
def test_refusals(tmp_path: Path, text: str, cluster: planner.Cluster | None, message: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=message):
        planner.calibrate([tmp_path / "file"], cluster=cluster)


def test_times_that_do_not_grow(tmp_path: Path) -> None:
    text = nccl_tests(8, 1)
    lines = text.splitlines()
    flat = [line.split() for line in lines if not line.startswith("#")]
    rows = [" ".join([*row[:5], "50.0", *row[6:]]) for row in flat]
    header = [line for line in lines if line.startswith("#")]
    (tmp_path / "flat.txt").write_text("\n".join(header + rows))
    with pytest.raises(ValueError, match="do not grow"):
        planner.calibrate([tmp_path / "flat.txt"], cluster=CLUSTER)


OWN = {
    "model": "gpt3-1.7b",
    "cluster": "a100:8",
    "layout": "dp=8,zero=1",
    "job": {"seq": 2048, "global_batch": 64, "micro_batch": 4, "recompute": "full"},
    "step_s": 2.5,
}


def test_own_step_times_in_every_form(tmp_path: Path) -> None:
    model = planner.load_model("gpt3-1.7b")
    planner.Layout(dp=8, zero=1).save(tmp_path / "layout.json")
    long = {
        **OWN,
        "model": {n: getattr(model, n) for n in model.__dataclass_fields__},
        "cluster": {"device": "a100", "devices": 8},
        "layout": str(tmp_path / "layout.json"),
    }
    csv = (
        "model,cluster,layout,seq,global_batch,micro_batch,recompute,step_s\n# a comment\n"
        'gpt3-1.7b,a100:8,"dp=8,zero=1",2048,64,4,full,2.5\n'
    )
    runs = [planner.read_own_runs(text)[0] for text in (json.dumps([OWN]), json.dumps(long), csv)]
    for run in runs:
        assert (run.model, run.layout, run.job) == (runs[0].model, runs[0].layout, runs[0].job)
        assert (run.cluster.kind, run.cluster.devices) == (runs[0].cluster.kind, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt5"}, "run 1: no model is named"),
        ({"step_s": 0}, "run 1: step_s must be positive"),
        ({"job": {"seq": 2048}}, "lacks global_batch"),
        ({"layout": "dq=3"}, "run 1: a layout is"),
        ({"job": {**OWN["job"], "colour": 1}}, "run 1: .*colour"),  # type: ignore[dict-item]
    ],
)
def test_wrong_step_times(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planner.read_own_runs(json.dumps([{**OWN, **changes}]))
