"""Runs a benchmark: starts all contestants, then measures them alternately, case by case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil, inf
from typing import Any

from unisono.bench.cases import Case
from unisono.bench.cluster import Cluster, network_bytes
from unisono.bench.contestant_ranks import CaseError, ContestantError, ContestantRanks
from unisono.bench.contestants import NETWORK, Contestant, reason_missing
from unisono.bench.core_latency import probe_core_latency_s
from unisono.bench.link_rate import link_rate, why_not_measured
from unisono.bench.machine_facts import busy_cores, describe_machine
from unisono.bench.results import Measurement, Row, RunReport
from unisono.bench.sizes import format_size
from unisono.communicator import estimate_call_s

_MAX_ITERATIONS = 200_000
_MOST_REWRITTEN = 500
"""Largest number of iterations that are timed one by one."""
_CALIBRATION_S = 2e-3
_OVERHEAD = 1.4
"""Ratio of the time of a row to the time of its timed calls. The remaining time is warm-up,
calibration and verification."""

Observer = Callable[[str, float], None]
"""A function that is called with the current step, and with the fraction of the run that is done
(0..1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Duration of measurements. The same rules apply to every contestant."""

    rounds: int = 7
    round_s: float = 0.03
    min_iterations: int = 3
    row_budget_s: float | None = None
    """Approximate time limit of one row in seconds. To keep this limit, rounds are shortened, if
    necessary to one call."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or not 0 < self.round_s < inf or self.min_iterations < 1:
            raise ValueError("rounds, round_s and min_iterations must be positive")
        if self.row_budget_s is not None and not self.row_budget_s > 0:
            raise ValueError("the time budget must be positive")

    def iterations(self, call_s: float, contestants: int) -> int:
        """Returns the number of calls per round for a contestant whose call takes `call_s`
        seconds."""
        round_s, least = self.round_s, self.min_iterations
        if self.row_budget_s is not None:
            share_s = self.row_budget_s / (self.rounds * contestants * _OVERHEAD)
            round_s = min(round_s, share_s)
            least = max(1, min(least, int(share_s / call_s)))
        return min(_MAX_ITERATIONS, max(least, ceil(round_s / call_s)))


def run_benchmark(
    cases: Sequence[Case],
    contestants: Sequence[str],
    *,
    ours: str,
    pace: Pace | None = None,
    bind: bool = False,
    cluster: Cluster | None = None,
    device: str = "",
    rewritten: bool = False,
    command: Sequence[str] = (),
    observe: Observer = lambda step, share: None,
) -> RunReport:
    """Measures all cases, which have the same number of ranks. Contestants that cannot run are
    skipped with a reason.

    With `bind`, rank r of every contestant is bound to core r modulo the number of cores. With a
    `cluster`, ranks run on its hosts, and the rate of its links is measured after every case
    (without iperf3, the stated rate is used). `device`: that of the tensors, see `Contestant`. With
    `rewritten`, every rank writes its input again before each call, as a program that computes it
    does; the time of these writes does not count.
    """
    pace, names = pace or Pace(), tuple(dict.fromkeys(contestants))
    machine = {**describe_machine(), "busy_cores": busy_cores()}
    with ExitStack() as stack:
        entrants = [Contestant(name=name, device=device) for name in names]
        worlds, skipped = _start_all(stack, entrants, cases[0].ranks, bind, cluster, observe)
        rows = []
        for index, case in enumerate(cases):

            def observe_round(round_: int, case: Case = case, index: int = index) -> None:
                share = (index + round_ / (pace.rounds + 1)) / len(cases)
                observe(f"{case.op} {format_size(case.size_bytes)}", share)

            row = _measure(case, worlds, skipped, pace, rewritten, observe_round)
            rows.append(row if cluster is None else _with_limit(row, cluster, skipped))
    return RunReport(
        ours=ours,
        contestants=names,
        rows=tuple(rows),
        skipped=skipped,
        settings=_settings(pace, bind, cluster)
        | ({"device": device} if device else {})
        | ({"rewritten": True} if rewritten else {}),
        machine=machine,
        command=tuple(command),
    )


def _settings(pace: Pace, bind: bool, cluster: Cluster | None) -> dict[str, Any]:
    settings = {**asdict(pace), "bind": bind}
    return settings if cluster is None else {**settings, "cluster": cluster.to_dict()}


def _start_all(
    stack: ExitStack,
    entrants: Sequence[Contestant],
    ranks: int,
    bind: bool,
    cluster: Cluster | None,
    observe: Observer,
) -> tuple[list[ContestantRanks], dict[str, str]]:
    """Starts the contestants. `stack` ends them at its exit. Returns the started contestants, and
    the reasons why others did not start."""
    worlds: list[ContestantRanks] = []
    skipped: dict[str, str] = {}
    for number, entrant in enumerate(entrants):
        if entrant.name == NETWORK:
            continue  # the limit of the network is calculated without processes
        observe(f"starting {entrant.name}", 0.0)
        own_cluster = None if cluster is None else replace(cluster, port=cluster.port + number)
        world = ContestantRanks(entrant, ranks, bind=bind, cluster=own_cluster)
        stack.enter_context(world)
        if reason := _start(world):
            skipped[entrant.name] = reason
        else:
            worlds.append(world)
    return worlds, skipped


def _with_limit(row: Row, cluster: Cluster, skipped: dict[str, str]) -> Row:
    """Adds to a row the shortest time that the links allow. The links' rate is measured while all
    ranks sleep. If no rate is known, `skipped` gets the reason."""
    link = link_rate(cluster.lab)
    if link is None:
        skipped[NETWORK] = f"{why_not_measured()}, and no rate is stated"
        return row
    limit_s = network_bytes(row.case, cluster.lab.hosts) / link.rate_Bps
    limit = Measurement(contestant=NETWORK, times_s=(limit_s,))
    return replace(row, measurements=(*row.measurements, limit), link=link)


def _start(world: ContestantRanks) -> str | None:
    """Starts a contestant. Returns the reason for a failure, or None."""
    if reason := reason_missing(world.contestant):
        return reason
    try:
        world.start()
    except ContestantError as error:
        world.close()
        return str(error)
    return None


class _Entry:
    """State of one contestant during the measurement of one row."""

    def __init__(self, world: ContestantRanks, rewritten: bool) -> None:
        self.world = world
        self._time_s = world.time_rewritten_s if rewritten else world.time_s
        self._most_iterations = _MOST_REWRITTEN if rewritten else _MAX_ITERATIONS
        self.iterations = 0
        self.messages = 1
        self.wrong = 0
        self.times_s: list[float] = []
        self.late_s: list[tuple[float, ...]] = []
        self.error: str | None = None

    def attempt(self, step: Callable[[], None]) -> None:
        """Runs a step unless an earlier step failed. A CaseError affects only this row."""
        if self.error is not None:
            return
        try:
            step()
        except CaseError as error:
            self.error = str(error)
        except ContestantError as error:  # the ranks are lost, so all later rows also fail
            self.error = str(error)
            self.world.close()

    def prepare(self, case: Case, pace: Pace, contestants: int) -> None:
        self.world.bind(case)
        self.messages = case.messages
        self.verify()
        most = self._most_iterations
        call_s = estimate_call_s(self._time_s, least_s=_CALIBRATION_S, most=most)
        if pace.row_budget_s is not None and call_s * pace.rounds > pace.row_budget_s:
            raise CaseError(f"too slow for the time budget: {call_s:.2g} s per call")
        self.iterations = min(most, pace.iterations(call_s, contestants))

    def verify(self) -> None:
        self.wrong += self.world.verify()

    def time(self) -> None:
        self.times_s.append(self._time_s(self.iterations) / self.messages)
        self.late_s.append(self.world.late_s)

    def measurement(self) -> Measurement:
        return Measurement(
            contestant=self.world.contestant.name,
            times_s=tuple(self.times_s) if self.error is None else (),
            iterations=self.iterations,
            wrong=self.wrong,
            error=self.error,
            late_s=tuple(self.late_s) if self.error is None else (),
        )


def _measure(
    case: Case,
    worlds: list[ContestantRanks],
    skipped: dict[str, str],
    pace: Pace,
    rewritten: bool,
    observe_round: Callable[[int], None],
) -> Row:
    entries = [_Entry(world, rewritten) for world in worlds]
    observe_round(0)
    for entry in entries:
        entry.attempt(partial(entry.prepare, case, pace, len(entries)))
    probes_s = []
    for round_ in range(pace.rounds):
        observe_round(round_ + 1)
        if (probe_s := probe_core_latency_s()) is not None:
            probes_s.append(probe_s)
        first = round_ % len(entries) if entries else 0
        for entry in entries[first:] + entries[:first]:
            entry.attempt(entry.time)
    for entry in entries:
        entry.attempt(entry.verify)
    for entry in entries:
        if not entry.world.alive:
            worlds.remove(entry.world)
            skipped[entry.world.contestant.name] = entry.error or "ended"
    return Row(
        case=case,
        measurements=tuple(entry.measurement() for entry in entries),
        probes_s=tuple(probes_s),
    )
