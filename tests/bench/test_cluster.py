"""Tests of benchmarks over lab hosts: the limit of the links, and libraries that connect between
hosts.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unisono import algorithms
from unisono.bench.cases import Case
from unisono.bench.cluster import Cluster, network_bytes
from unisono.bench.contestants import Contestant, reason_missing
from unisono.bench.lab import Lab, LabError
from unisono.bench.link_rate import link_rate, probe_payload_Bps, rate_Bps
from unisono.bench.runner import Pace, run_benchmark
from unisono.errors import UnsupportedError
from unisono.schedule import Schedule
from unisono.types import Op

MEGABIT_Bps = 1e6 / 8
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "gather")


def busiest_host_bytes(schedule: Schedule, case: Case, hosts: int) -> float:
    """Returns the most bytes that one host sends or receives in a schedule."""
    per_host = case.ranks // hosts
    whole = schedule.collective.num_chunks
    if case.op == "all_to_all":
        # The schedule's chunks are the blocks of a matrix with one block for each pair of ranks. A
        # rank's vector is one row of this matrix.
        whole //= case.ranks
    sent, received = [0] * hosts, [0] * hosts
    columns = schedule.columns
    for src, dst, count in zip(columns.src, columns.dst, columns.count, strict=True):
        if src // per_host != dst // per_host:
            sent[src // per_host] += int(count)
            received[dst // per_host] += int(count)
    return max(*sent, *received) / whole * case.size_bytes


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (4, 1), (2, 2), (2, 4), (4, 2)])
def test_no_schedule_moves_less_than_the_limit(op: str, hosts: int, per_host: int) -> None:
    ranks = hosts * per_host
    case = Case(op=op, ranks=ranks, nbytes=ranks * 4096)
    least = []
    for name in algorithms.names(Op(op)):
        try:
            schedule = algorithms.build(Op(op), name, ranks=ranks)
        except UnsupportedError:
            continue
        least.append(busiest_host_bytes(schedule, case, hosts))
    assert min(least) >= network_bytes(case, hosts) - 1e-6
    if per_host == 1:
        assert min(least) == pytest.approx(
            network_bytes(case, hosts)
        )  # at least one schedule reaches the limit


def test_bytes_between_hosts_for_different_pieces() -> None:
    def least(op: str, root: int = 0) -> float:
        return network_bytes(Case(op=op, ranks=4, nbytes=400, root=root), hosts=2)

    # The four ranks' pieces have 40, 80, 120 and 160 bytes.
    assert least("all_gather_v") == least("reduce_scatter_v") == 400 - 120
    assert (least("gather_v"), least("scatter_v", root=3)) == (280, 120)
    # Of the data of host 0, 40 + 80 bytes of rank 0 and 80 + 120 bytes of rank 1 stay on this host.
    # On host 1, equally many bytes stay.
    assert least("all_to_all_v") == 800 - 320


@pytest.mark.lab
@pytest.mark.program("iperf3")
def test_the_payload_rate_adds_both_rails() -> None:
    with Lab(hosts=2, rate="100mbit", rails=2) as lab:
        rates = [probe_payload_Bps(lab) / MEGABIT_Bps]
        # other programs can only reduce the measured rate
        while rates[-1] < 102 and len(rates) < 5:
            rates.append(probe_payload_Bps(lab) / MEGABIT_Bps)
    assert 102 <= max(rates) <= 200  # more than the 100 Mbit/s of one rail


def without_iperf3(folder: Path) -> str:
    """Returns a PATH with all programs of this machine except iperf3, as links in the folder."""
    for directory in os.environ["PATH"].split(os.pathsep):
        for program in Path(directory).glob("*"):
            if program.name != "iperf3" and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program.absolute())
    return str(folder)


def test_rates_in_the_notation_of_tc() -> None:
    assert [rate_Bps(text) for text in ("1gbit", "200Mbit", "1.5mbit", "8bit")] == [
        125e6, 25e6, 187_500, 1,
    ]  # fmt: skip
    assert [rate_Bps(text) for text in ("1kibit", "2mbps", "1kibps")] == [128, 2e6, 1024]
    with pytest.raises(LabError, match="expected a rate such as 1gbit"):
        rate_Bps("fast")


def test_without_iperf3_the_rate_is_the_stated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = link_rate(Lab(hosts=3, rate="1gbit", rates={1: "500mbit", 2: "1mbit"}, rails=2))
    assert found is not None
    assert found.rate_Bps == 2 * 500 * MEGABIT_Bps  # the slower of hosts 0 and 1, over two rails
    assert found.why_stated is not None and "apt install iperf3" in found.why_stated
    assert link_rate(Lab(hosts=2)) is None


@pytest.mark.lab
def test_a_run_over_hosts_needs_no_iperf3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", without_iperf3(tmp_path))
    case = Case(op="broadcast", ranks=2, nbytes=1 << 20)
    pace = Pace(rounds=1, round_s=0.001, min_iterations=1)
    reports = []
    for rate in ("1gbit", None):
        with Lab(hosts=2, rate=rate) as lab:
            cluster = Cluster(lab=lab)
            names = ["unisono", "network"]
            reports.append(run_benchmark([case], names, ours="unisono", pace=pace, cluster=cluster))
    assert not any(report.failed for report in reports)
    limit = reports[0].to_dict()["rows"][0]["results"]["network"]
    assert limit["time_s"] == pytest.approx((1 << 20) / 125e6)
    assert reports[0].skipped == {}
    assert "no rate is stated" in reports[1].skipped["network"]


def test_ranks_are_placed_in_blocks() -> None:
    cluster = Cluster(lab=Lab(hosts=3, rails=2), per_host=2, port=7)
    assert [cluster.host(rank) for rank in range(cluster.ranks)] == [0, 0, 1, 1, 2, 2]
    assert (cluster.rendezvous, cluster.interfaces) == ("tcp://10.77.0.1:7", "eth0,eth1")


@pytest.mark.lab
@pytest.mark.torch
@pytest.mark.program("iperf3")
def test_contestants_run_over_hosts_next_to_the_limit() -> None:
    names = [n for n in ("gloo", "openmpi", "mpich") if not reason_missing(Contestant(name=n))]
    if not names:
        pytest.skip("no peer is installed")
    case = Case(op="all_reduce", ranks=3, nbytes=65_536)
    with Lab(hosts=3, rate="1gbit") as lab:
        report = run_benchmark(
            [case],
            [*names, "network"],
            ours=names[0],
            pace=Pace(rounds=2, round_s=0.001, min_iterations=1),
            cluster=Cluster(lab=lab),
        )
    assert report.skipped == {}
    assert not report.failed
    assert report.limit == "network"
    document = report.to_dict()
    assert document["settings"]["cluster"]["hosts"] == 3
    results = document["rows"][0]["results"]
    payload_Bps = document["rows"][0]["payload_Bps"]
    assert results["network"]["time_s"] == pytest.approx(65_536 * 4 / 3 / payload_Bps, rel=1e-3)
    assert all(results[name]["time_over_limit"] > 0 for name in names)


@pytest.mark.lab
@pytest.mark.torch
@pytest.mark.parametrize("name", ["unisono", "gloo", "openmpi", "mpich"])
def test_no_contestant_bypasses_the_links(name: str) -> None:
    """Tests that a library does not bypass the links through the shared kernel and memory of the
    hosts.
    """
    if reason := reason_missing(Contestant(name=name)):
        pytest.skip(reason)
    case = Case(op="all_reduce", ranks=2, nbytes=1 << 20)
    with Lab(hosts=2, rate="100mbit") as lab:
        report = run_benchmark(
            [case],
            [name],
            ours=name,
            pace=Pace(rounds=1, round_s=0.001, min_iterations=1),
            cluster=Cluster(lab=lab),
        )
    # The token bucket lets a quarter of the message pass at once, so the link may take less than
    # `least_s`. Shared memory would take only a hundredth of `least_s`. The measured rate is not
    # used here, since other programs can reduce it.
    least_s = case.size_bytes / (100 * MEGABIT_Bps)
    assert report.to_dict()["rows"][0]["results"][name]["time_s"] > 0.5 * least_s
