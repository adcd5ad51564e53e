"""How long an algorithm takes on one host: rounds, bytes and reductions, each times a constant.

The model is that of Hockney, "The communication challenge for MPP" (1994), with a term for
reductions as in Thakur, Rabenseifner, Gropp (2005), for ranks that share one memory and perhaps
their cores. Time is a straight line over the bytes, so which algorithm is the fastest from where on
is known exactly. For several hosts see `network`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from unisono.algorithms import cost, find, names
from unisono.errors import UnsupportedError
from unisono.types import Op

_SIMPLE = ("direct", "one_shot")
"""Preferred among equals: fewer records to run than the cost tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What a call takes, in seconds: once, and for each round; for each round and each rank that
    has no core of its own; for each byte that the busiest rank hands on, and that it reduces.

    The defaults are read off the medians in `benchmarks/results/native-n*.json`, of a virtual
    machine with 2 cores of AMD EPYC; `benchmarks/regret.py --fit` fits others to its results.
    """

    call_s: float = 0.3e-6
    round_s: float = 0.3e-6
    switch_s: float = 2.5e-6
    byte_s: float = 0.075e-9
    reduced_s: float = 0.03e-9


REFERENCE = Constants()


class CostLine(NamedTuple):
    """Seconds as a function of the bytes: `fixed_s + nbytes * byte_s`."""

    fixed_s: float
    byte_s: float

    def at(self, nbytes: float) -> float:
        """Seconds for so many bytes."""
        return self.fixed_s + nbytes * self.byte_s


class RoundWork(NamedTuple):
    """What the constants are multiplied by; the last two are multiples of the message's bytes."""

    calls: float
    rounds: float
    switches: float
    written: float
    reduced: float

    def line(self, constants: Constants) -> CostLine:
        """Time over bytes."""
        return CostLine(
            constants.call_s + self.rounds * constants.round_s + self.switches * constants.switch_s,
            self.written * constants.byte_s + self.reduced * constants.reduced_s,
        )


def work(op: Op, algorithm: str, *, ranks: int, cores: int) -> RoundWork:
    """What a rank has to do. Raises `UnsupportedError` as `cost` does.

    Where all share one memory a value is written once for all its readers, so a round hands on at
    most the whole vector. Ranks that share cores wait for each other's bytes.

    >>> work(Op.ALL_REDUCE, "one_shot", ranks=4, cores=4)
    RoundWork(calls=1.0, rounds=1.0, switches=0.0, written=1.0, reduced=3.0)
    """
    found = cost(op, algorithm, ranks=ranks)
    rounds = max(found.rounds, 1) if ranks > 1 else 0
    return weigh(
        rounds=rounds,
        written=min(found.bytes_sent, Fraction(rounds)),
        reduced=found.reductions,
        ranks=ranks,
        cores=cores,
    )


def weigh(
    *, rounds: int, written: Fraction, reduced: Fraction, ranks: int, cores: int
) -> RoundWork:
    """What so many ranks on so many cores make of rounds and bytes."""
    crowd = max(1.0, ranks / cores)
    return RoundWork(
        calls=1.0,
        rounds=float(rounds),
        switches=float(rounds * max(0, ranks - cores)),
        written=crowd * float(written),
        reduced=crowd * float(reduced),
    )


def line(
    op: Op, algorithm: str, *, ranks: int, cores: int, constants: Constants = REFERENCE
) -> CostLine:
    """Time over bytes. Raises `UnsupportedError` as `cost` does."""
    return work(op, algorithm, ranks=ranks, cores=cores).line(constants)


def predict(
    op: Op | str,
    algorithm: str,
    ranks: int,
    nbytes: int,
    *,
    cores: int,
    constants: Constants = REFERENCE,
) -> float:
    """Seconds that a call takes; `nbytes` are those of the larger buffer of a rank.

    Raises `UnsupportedError` as `cost` does.

    >>> ring = predict("all_reduce", "ring", 4, 1 << 20, cores=4)
    >>> ring > predict("all_reduce", "direct", 4, 1 << 20, cores=4)
    True
    """
    return line(Op(op), algorithm, ranks=ranks, cores=cores, constants=constants).at(nbytes)


class Fastest(NamedTuple):
    """`algorithm` is the fastest from `least` bytes on."""

    least: int
    algorithm: str


@cache
def fastest(
    op: Op, *, ranks: int, cores: int, constants: Constants = REFERENCE
) -> tuple[Fastest, ...]:
    """Which algorithm is predicted to be the fastest, by size: the lower envelope of the lines.

    >>> [name for _, name in fastest(Op.ALL_REDUCE, ranks=4, cores=2)]
    ['one_shot', 'direct']
    """
    lines: dict[str, CostLine] = {}
    for name in sorted(names(op), key=lambda name: (name not in _SIMPLE, name)):
        if find(op, name).for_hosts:
            continue  # on one host there is nothing to save
        try:
            lines[name] = line(op, name, ranks=ranks, cores=cores, constants=constants)
        except UnsupportedError:
            continue
    return envelope(lines)


def envelope(lines: Mapping[str, CostLine]) -> tuple[Fastest, ...]:
    """Which line is the lowest, by size; among equals the first.

    >>> envelope({"a": CostLine(1.0, 2.0), "b": CostLine(3.0, 1.0)})
    (Fastest(least=0, algorithm='a'), Fastest(least=3, algorithm='b'))
    """
    current = min(lines, key=lambda name: lines[name])
    found = [Fastest(0, current)]
    while True:
        here = lines[current]
        meets = {
            name: ((other.fixed_s - here.fixed_s) / (here.byte_s - other.byte_s), other.byte_s)
            for name, other in lines.items()
            if other.byte_s < here.byte_s
        }
        if not meets:
            return tuple(found)
        current = min(meets, key=lambda name: meets[name])
        found.append(Fastest(int(meets[current][0]) + 1, current))
