"""Explanation of the algorithm that serves a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unisono import algorithms
from unisono.algorithms import Hosts
from unisono.communicator.call_cache import AlgorithmChoice
from unisono.errors import UnsupportedError
from unisono.execution import Form
from unisono.selection import SelectionTable, candidates, predict_on
from unisono.types import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """An algorithm with the time that the cost model predicts and the measured time (None if not
    measured).
    """

    algorithm: str
    predicted_s: float
    measured_s: float | None = None

    def __str__(self) -> str:
        measured = (
            "not measured" if self.measured_s is None else f"measured {_time(self.measured_s)}"
        )
        return f"{self.algorithm}: predicted {_time(self.predicted_s)}, {measured}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The choice of an algorithm for one kind of call. The printed text shows the choice and its
    reasons.

    `rule` decided the choice. `source` is the origin of the rule: an argument, the environment, a
    file, the built-in rules or the cost model. `single_copy` is True if ranks read each other's
    memory in place, without staging buffers. `runner_up` is the fastest other algorithm: by
    measurement if the table has measurements of others, else by prediction; None if no other
    algorithm exists.
    """

    op: Op
    nbytes: int
    ranks: int
    hosts: int
    algorithm: str
    reason: str
    block_bytes: int
    single_copy: bool
    rule: str
    source: str
    time: Estimate
    runner_up: Estimate | None

    @classmethod
    def of(
        cls, op: Op, nbytes: int, hosts: Hosts, choice: AlgorithmChoice, table: SelectionTable
    ) -> Explanation:
        """Explains a choice that the selection table made for the ranks of these hosts."""
        selected = choice.selected
        assert selected is not None, "the table made this choice"
        name = choice.plan.name
        estimates = {e.algorithm: e for e in _estimates(op, nbytes, hosts, name, table)}
        time = estimates.pop(name)
        return cls(
            op=op,
            nbytes=nbytes,
            ranks=sum(map(len, hosts)),
            hosts=len(hosts),
            algorithm=name,
            reason=selected.rule.reason or "the rule names it",
            block_bytes=choice.plan.block_bytes,
            single_copy=choice.plan.form is Form.SINGLE_COPY,
            rule=str(selected.rule),
            source=selected.source,
            time=time,
            runner_up=min(estimates.values(), key=_rank, default=None),
        )

    def __str__(self) -> str:
        where = f" of {self.hosts} hosts" if self.hosts > 1 else ""
        once = ", copied once" if self.single_copy else ""
        second = "none" if self.runner_up is None else self.runner_up
        return (
            f"{self.op} of {self.nbytes} bytes on {self.ranks} ranks{where}: {self.algorithm} "
            f"({self.reason}), in blocks of {self.block_bytes} bytes{once}\n"
            f"rule: {self.rule} ({self.source})\n"
            f"time: {self.time}\n"
            f"runner-up: {second}"
        )


def _estimates(
    op: Op, nbytes: int, hosts: Hosts, chosen: str, table: SelectionTable
) -> Iterator[Estimate]:
    """Yields the predicted time of every algorithm that can serve the call, and the measured time
    if known.
    """
    alone = len(hosts) == 1
    times_s = table.times_s(op, nbytes, sum(map(len, hosts))) if alone else {}
    known = algorithms.names(op) if alone else candidates(op)
    for name in dict.fromkeys([chosen, *times_s, *known]):
        if alone and name not in (chosen, *times_s) and algorithms.find(op, name).for_hosts:
            continue
        try:
            predicted_s = predict_on(op, name, nbytes, hosts=hosts, cores=table.cores)
        except UnsupportedError:
            continue
        yield Estimate(algorithm=name, predicted_s=predicted_s, measured_s=times_s.get(name))


def _rank(estimate: Estimate) -> tuple[bool, float, str]:
    """Sort key: measured algorithms first, then by time."""
    measured_s, name = estimate.measured_s, estimate.algorithm
    return measured_s is None, measured_s or estimate.predicted_s, name


def _time(time_s: float) -> str:
    """Returns a time as text.

    >>> _time(2.5e-6), _time(0.0123)
    ('2.5 us', '12.3 ms')
    """
    return f"{time_s * 1e6:.3g} us" if time_s < 1e-3 else f"{time_s * 1e3:.3g} ms"
