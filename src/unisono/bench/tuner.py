"""Runs `unisono tune`: measures which algorithms are fastest on this machine, and returns a
selection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import sqrt

from unisono import algorithms
from unisono.bench.algorithm_measurement import (
    MeasurementLength,
    distinct,
    measure_alternating,
    medians,
)
from unisono.bench.cases import OPERATIONS, Case
from unisono.bench.contestant_ranks import ContestantRanks
from unisono.bench.contestants import OURS, Contestant
from unisono.bench.journal import Journal, MeasuredCell
from unisono.bench.machine_facts import usable_cores
from unisono.bench.rank_limit import reason_against
from unisono.bench.runner import Observer
from unisono.bench.sizes import format_size
from unisono.communicator import IntRange, Measured, Rule, Selection
from unisono.errors import UnsupportedError
from unisono.selection import SelectionTable, predict
from unisono.types import Op

TUNABLE = tuple(op for op in Op if op in OPERATIONS and len(algorithms.names(op)) > 1)
"""Operations that the benchmark can measure and that have several algorithms."""

_CANDIDATE_FACTOR = 3.0
_MOST_CANDIDATES = 5
_GAIN = 1.05
"""Minimum speedup over the default algorithm; a smaller speedup is mostly noise."""
_BLOCKS = (64 << 10, 256 << 10)
_LEAST_VARIED_BYTES = 512 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """A request to measure cells. Raises `ValueError` if it is invalid."""

    ops: tuple[Op, ...]
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    budget_s: float = 150.0

    def __post_init__(self) -> None:
        if unknown := [op for op in self.ops if op not in TUNABLE]:
            raise ValueError(f"{unknown[0]} has only one algorithm; tunable: {', '.join(TUNABLE)}")
        if not self.cells or min(self.ranks) < 2 or min(self.sizes) < 1:
            raise ValueError("expected operations, at least 2 ranks, and sizes above 0")
        # Check the number of ranks before smaller groups are measured.
        if reason := reason_against(max(self.ranks)):
            raise ValueError(reason)

    @property
    def cells(self) -> list[MeasuredCell]:
        """All cells, grouped by number of ranks, so that each group of ranks starts only once."""
        return [
            MeasuredCell(op=op, ranks=ranks, nbytes=nbytes)
            for ranks in dict.fromkeys(self.ranks)
            for op in dict.fromkeys(self.ops)
            for nbytes in sorted(set(self.sizes))
        ]


def default_algorithm(op: Op, nbytes: int, ranks: int) -> str:
    """Returns the algorithm that is chosen without a selection file."""
    return SelectionTable(cores=usable_cores()).choose(op, nbytes, ranks=ranks).rule.algorithm


def candidates(op: Op, nbytes: int, ranks: int) -> list[str]:
    """Returns the default algorithm, then other algorithms with the shortest predicted times, the
    fastest first. Algorithms with much longer predicted times than the fastest are left out."""
    default = default_algorithm(op, nbytes, ranks)
    names = [name for name in algorithms.names(op) if name != default]
    cores = usable_cores()
    times_s: dict[str, float] = {}
    for name in distinct(op, [default, *names], ranks):
        try:
            times_s[name] = predict(op, name, ranks, nbytes, cores=cores)
        except UnsupportedError:
            continue
    most_s = min(times_s.values()) * _CANDIDATE_FACTOR
    ordered = sorted(times_s, key=lambda name: (name != default, times_s[name]))
    return [n for n in ordered if n == default or times_s[n] <= most_s][:_MOST_CANDIDATES]


def variants(name: str, nbytes: int) -> list[str]:
    """Returns variants of an algorithm: with two channels, and with other block sizes. Returns no
    variants for small messages."""
    if nbytes < _LEAST_VARIED_BYTES:
        return []
    return [f"{name}:channels=2", *(f"{name}:block_bytes={block}" for block in _BLOCKS)]


def tune(
    request: TuneRequest, journal: Journal, observe: Observer = lambda step, share: None
) -> Selection:
    """Measures the cells that are not in the journal, one after another. Returns the selection."""
    cells = request.cells
    todo = [cell for cell in cells if cell not in journal.cells]
    length = MeasurementLength(budget_s=request.budget_s / len(cells) / 2)
    done = len(cells) - len(todo)
    for ranks, group in groupby(todo, key=lambda cell: cell.ranks):
        observe(f"starting {ranks} ranks", done / len(cells))
        with ContestantRanks(Contestant(name=OURS["native"]), ranks) as world:
            world.start()
            for cell in group:
                where = f"{cell.op} {format_size(cell.nbytes)}, {ranks} ranks"
                share = done / len(cells)

                def report(name: str, where: str = where, share: float = share) -> None:
                    observe(f"{where}: {name}", share)

                journal.add(cell, _measure(world, cell, length, report))
                done += 1
    observe("done", 1.0)
    return select({cell: journal.cells[cell] for cell in cells})


def _measure(
    world: ContestantRanks,
    cell: MeasuredCell,
    length: MeasurementLength,
    report: Callable[[str], None],
) -> dict[str, float]:
    """Measures a cell twice: first all candidates, then the default, the fastest algorithm, and its
    variants.

    Times of the second measurement replace times of the first, because the fastest algorithm of the
    first measurement is partly fastest by chance.
    """
    op, case = Op(cell.op), Case(op=cell.op, ranks=cell.ranks, nbytes=cell.nbytes)
    default = default_algorithm(op, cell.nbytes, cell.ranks)
    names = candidates(op, cell.nbytes, cell.ranks)
    times_s = medians(
        measure_alternating(world, case, names, length, keep=[default], observe=report)
    )
    best = min(times_s, key=lambda name: times_s[name])
    finalists = list(dict.fromkeys([default, best, *variants(best, cell.nbytes)]))
    if len(finalists) > 1:
        final = medians(
            measure_alternating(
                world, case, finalists, length, keep=[best, default], observe=report
            )
        )
        times_s |= final
    return times_s


def select(cells: Mapping[MeasuredCell, Mapping[str, float]]) -> Selection:
    """Returns a selection of the fastest measured algorithms. Borders between rules are geometric
    means of adjacent measured sizes.

    >>> cell = MeasuredCell(op="scatter", ranks=2, nbytes=64)
    >>> print(select({cell: {"direct": 2e-6, "chain": 1e-6}}).rules[0])
    scatter, 2 ranks: chain
    """
    ordered = sorted(cells, key=lambda cell: (cell.op, cell.ranks, cell.nbytes))
    rules: list[Rule] = []
    for (op, ranks), group in groupby(ordered, key=lambda cell: (cell.op, cell.ranks)):
        rules += _rules(Op(op), ranks, {cell.nbytes: cells[cell] for cell in group})
    measured = tuple(
        Measured(
            op=Op(cell.op), ranks=cell.ranks, nbytes=cell.nbytes, algorithm=name, time_s=time_s
        )
        for cell in ordered
        for name, time_s in cells[cell].items()
    )
    return Selection(rules=tuple(rules), measured=measured)


def _rules(op: Op, ranks: int, sizes: Mapping[int, Mapping[str, float]]) -> Iterator[Rule]:
    winners = {size: _winner(op, size, ranks, times_s) for size, times_s in sizes.items()}
    borders = [
        (int(sqrt(below * above)), winners[above])
        for below, above in pairwise(sorted(winners))
        if winners[below] != winners[above]
    ]
    least, winner = 0, winners[min(winners)]
    for border, following in borders:
        yield _rule(op, ranks, winner, IntRange(least, border))
        least, winner = border + 1, following
    yield _rule(op, ranks, winner, IntRange(least))


def _rule(op: Op, ranks: int, algorithm: str, nbytes: IntRange) -> Rule:
    reason = "the fastest that was measured here"
    return Rule(
        op=op, algorithm=algorithm, nbytes=nbytes, ranks=IntRange(ranks, ranks), reason=reason
    )


def _winner(op: Op, nbytes: int, ranks: int, times_s: Mapping[str, float]) -> str:
    """Returns the default algorithm, or the fastest algorithm if it is faster by more than the
    noise."""
    best = min(times_s, key=lambda name: times_s[name])
    default = default_algorithm(op, nbytes, ranks)
    kept = times_s.get(default)
    return default if kept is not None and kept <= times_s[best] * _GAIN else best
