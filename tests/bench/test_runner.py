"""Tests of benchmark runs with small messages between real ranks in real processes."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from unisono.bench import contestant_ranks as world_module
from unisono.bench.cases import OPERATIONS, Case
from unisono.bench.contestant_ranks import ContestantError
from unisono.bench.contestants import Contestant, reason_missing
from unisono.bench.machine_facts import usable_cores
from unisono.bench.rank_limit import reason_against
from unisono.bench.results import RunReport
from unisono.bench.runner import Pace, run_benchmark
from unisono.config import MOST_RANKS

QUICK = Pace(rounds=2, round_s=0.001, min_iterations=1)
CASES = [
    Case(op="all_reduce", ranks=2, nbytes=64),
    Case(op="all_to_all", ranks=2, nbytes=100_000),
    Case(op="ping_pong", ranks=2, nbytes=8),
    Case(op="stream", ranks=2, nbytes=3000),
]
# Cases that some of the compared libraries do not support.
SPECIAL = [
    *(Case(op=op, ranks=2, nbytes=1000, root=1) for op in OPERATIONS if op.endswith("_v")),
    Case(op="all_reduce", ranks=2, nbytes=1000, dtype="int32", redop="lor"),
    Case(op="scan", ranks=2, nbytes=1000, dtype="bool", redop="lxor"),
    Case(op="all_reduce", ranks=2, nbytes=1000, dtype="float32_int32", redop="maxloc"),
    Case(op="broadcast", ranks=2, nbytes=1000, dtype="float8_e4m3fn"),
]
# The program of a rank whose library returns a wrong element.
WRONG_RANK = """
from unisono.bench import contestant_rank
from unisono.bench.peers.base import Peer

class WrongPeer(Peer):
    def __init__(self, rank):
        self.rank = rank
    def bind(self, case, x, out):
        return lambda: x.__setitem__(0, 5)

contestant_rank.connect_peer = lambda contestant, rank, ranks, rendezvous: WrongPeer(rank)
contestant_rank.main()
"""


def run(*contestants: str, ours: str) -> RunReport:
    return run_benchmark(CASES, contestants, ours=ours, pace=QUICK)


@pytest.mark.torch
def test_gloo_beside_the_memory_limit() -> None:
    pytest.importorskip("torch")
    report = run("gloo", "memory", ours="gloo")
    assert report.skipped == {}
    assert not report.failed
    for row in report.rows:
        assert [m.contestant for m in row.measurements] == ["gloo", "memory"]
        assert all(len(m.times_s) == 2 and m.iterations > 0 for m in row.measurements)
        assert (row.ratio("gloo", "memory") or 0.0) > 0.0


@pytest.mark.parametrize("rewritten", [False, True])
def test_shared_arrays_beside_the_kernels_alone(rewritten: bool) -> None:
    ops = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
    cases = [Case(op=op, ranks=2, nbytes=100_000) for op in ops]
    names = ["unisono-shared", "unisono", "kernels", "kernels-streaming"]
    report = run_benchmark(
        cases, names, ours="unisono-shared", pace=QUICK, bind=True, rewritten=rewritten
    )
    assert report.skipped == {}
    assert not report.failed
    assert report.limit == "kernels"
    assert all(len(m.times_s) == 2 for row in report.rows for m in row.measurements)
    assert report.settings.get("rewritten", False) == rewritten


def test_the_kernels_alone_are_a_limit_of_five_operations() -> None:
    case = Case(op="gather", ranks=2, nbytes=1000)
    report = run_benchmark([case], ["unisono", "kernels"], ours="unisono", pace=QUICK)
    found = report.rows[0].of("kernels")
    assert found is not None
    assert found.error == "the limit of gather is not defined"


@pytest.mark.parametrize("name", ["unisono", "unisono:ring"])
def test_our_communicator(name: str) -> None:
    # no ring algorithm exists for all_to_all
    cases = [case for case in CASES if case.op != "all_to_all"]
    report = run_benchmark(cases, [name, "memory"], ours=name, pace=QUICK, bind=True)
    assert report.skipped == {}
    assert not report.failed


@pytest.mark.torch
def test_our_torch_backend() -> None:
    pytest.importorskip("torch")
    report = run("unisono-torch", ours="unisono-torch")
    assert report.skipped == {}
    assert not report.failed


@pytest.mark.parametrize("name", ["openmpi", "mpich", "impi"])
def test_mpi(name: str) -> None:
    if reason_missing(Contestant(name=name)) is not None:
        pytest.skip(f"{name} is not installed")
    cases = [*CASES, *SPECIAL]
    report = run_benchmark(cases, [name], ours=name, pace=QUICK)
    assert report.skipped == {}
    assert not report.failed


@pytest.mark.torch
def test_peers_are_skipped_for_operations_they_lack() -> None:
    pytest.importorskip("torch")
    report = run_benchmark(SPECIAL, ["unisono", "gloo"], ours="unisono", pace=QUICK)
    assert not report.failed
    errors = {}
    for row in report.rows:
        found = row.of("gloo")
        assert found is not None
        errors[row.case.op, row.case.redop] = found.error
    assert errors.pop(("all_to_all_v", "sum")) is None
    assert errors["gather_v", "sum"] == "gather of gloo needs pieces of equal length"
    assert errors["all_reduce", "lor"] == "torch.distributed has no lor"
    assert errors["all_reduce", "maxloc"] == "torch has no float32_int32"
    assert all(errors.values())


def test_a_wrong_result_is_found_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "wrong_rank.py"
    script.write_text(WRONG_RANK)

    def plan_wrong_ranks(
        contestant: Contestant, *, ranks: int, folder: Path, bind: bool, cluster: object
    ) -> list[tuple[str, ...]]:
        command = [sys.executable, str(script), contestant.name, str(folder), "--ranks", str(ranks)]
        return [(*command, "--rank", str(rank)) for rank in range(ranks)]

    monkeypatch.setattr(world_module, "plan_launch", plan_wrong_ranks)
    report = run_benchmark(CASES[:1], ["unisono"], ours="unisono", pace=QUICK)
    # nearly all of 16 elements are wrong, on 2 ranks and in 2 checks
    assert report.wrong >= 2 * 2 * 15
    assert report.failed


def test_ended_ranks_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_ending_ranks(
        contestant: Contestant, *, ranks: int, folder: Path, bind: bool, cluster: object
    ) -> list[tuple[str, ...]]:
        command = (sys.executable, "-c", "print('no such library'); raise SystemExit(3)")
        return [command] * ranks

    monkeypatch.setattr(world_module, "plan_launch", plan_ending_ranks)
    report = run("unisono", ours="unisono")
    assert "no such library" in report.skipped["unisono"]
    assert report.failed


def test_too_many_ranks_are_refused_before_any_process_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world_module.subprocess, "Popen", None)
    case = Case(op="all_reduce", ranks=MOST_RANKS + 1, nbytes=64)
    with pytest.raises(ContestantError, match="4097 ranks are too many: at most "):
        run_benchmark([case], ["unisono"], ours="unisono", pace=QUICK)


def test_the_limit_of_ranks() -> None:
    most = min(64 * usable_cores(), MOST_RANKS)
    assert reason_against(most) == ""
    assert f"{most + 1} ranks are too many: at most {most}, " in reason_against(most + 1)
    limits = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (3, limits[1]))
    try:
        assert reason_against(3) == ""
        assert "at most 3, the limit of processes (ulimit -u)" in reason_against(4)
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, limits)


def test_pace_has_one_rule_for_all_contestants() -> None:
    pace = Pace(rounds=5, round_s=0.03)
    assert pace.iterations(1e-6, contestants=3) == 30_000
    assert pace.iterations(0.1, contestants=3) == 3


def test_a_budget_shortens_rounds_and_then_allows_single_calls() -> None:
    pace = Pace(rounds=5, round_s=0.03, row_budget_s=0.21)
    assert pace.iterations(1e-6, contestants=3) == 10_000
    assert pace.iterations(0.1, contestants=3) == 1


def test_a_contestant_too_slow_for_the_budget_is_skipped() -> None:
    pace = Pace(rounds=2, row_budget_s=1e-9)
    report = run_benchmark(CASES[:1], ["memory"], ours="memory", pace=pace)
    (measurement,) = report.rows[0].measurements
    assert "too slow for the time budget" in str(measurement.error)
