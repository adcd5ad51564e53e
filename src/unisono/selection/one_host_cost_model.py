"""Cost of an algorithm on one host: a constant time for each round, byte and reduced byte.

The model is that of Hockney, "The communication challenge for MPP" (1994). Its term for reductions
follows Thakur, Rabenseifner, Gropp (2005). The ranks share memory and may share cores. The time is
a linear function of the bytes, so the sizes at which the fastest algorithm changes are exact.
`network_cost_model` handles several hosts.
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
"""Preferred among algorithms of equal cost, because they run fewer records, which the cost ignores.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Seconds that each part of a call takes.

    - `call_s`: each call.
    - `round_s`: each round.
    - `switch_s`: each rank without a core of its own, in each round.
    - `byte_s`: each byte that the busiest rank sends.
    - `reduced_s`: each byte that the busiest rank reduces.

    The defaults come from the medians in `benchmarks/results/native-n*.json`, on a virtual machine
    with 2 cores of AMD EPYC. `benchmarks/regret.py --fit` fits other constants to its results.
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
        """Returns the seconds for a message of `nbytes`."""
        return self.fixed_s + nbytes * self.byte_s


class RoundWork(NamedTuple):
    """Work of one rank in a call: how many times the call takes each of the `Constants`.

    `written` and `reduced` are multiples of the message's bytes.
    """

    calls: float
    rounds: float
    switches: float
    written: float
    reduced: float

    def line(self, constants: Constants) -> CostLine:
        """Returns the time as a function of the bytes."""
        return CostLine(
            constants.call_s + self.rounds * constants.round_s + self.switches * constants.switch_s,
            self.written * constants.byte_s + self.reduced * constants.reduced_s,
        )


def work(op: Op, algorithm: str, *, ranks: int, cores: int) -> RoundWork:
    """Returns the rounds, bytes and reductions of a rank in a call. Raises `UnsupportedError` as
    `cost` does.

    In shared memory, a rank writes a value once for all readers, so a round sends at most the whole
    vector. Ranks that share cores also wait for each other's bytes.

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
    """Returns the work of a rank with these rounds and bytes. Ranks that share a core have more
    work.
    """
    ranks_per_core = max(1.0, ranks / cores)
    return RoundWork(
        calls=1.0,
        rounds=float(rounds),
        switches=float(rounds * max(0, ranks - cores)),
        written=ranks_per_core * float(written),
        reduced=ranks_per_core * float(reduced),
    )


def line(
    op: Op, algorithm: str, *, ranks: int, cores: int, constants: Constants = REFERENCE
) -> CostLine:
    """Returns the time of an algorithm as a function of the bytes. Raises `UnsupportedError` as
    `cost` does.
    """
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
    """Returns the seconds for a call. `nbytes` is the size of the larger of a rank's input and
    output.

    Raises `UnsupportedError` as `cost` does.

    >>> ring = predict("all_reduce", "ring", 4, 1 << 20, cores=4)
    >>> ring > predict("all_reduce", "direct", 4, 1 << 20, cores=4)
    True
    """
    return line(Op(op), algorithm, ranks=ranks, cores=cores, constants=constants).at(nbytes)


class Fastest(NamedTuple):
    """The algorithm that is fastest from `least` bytes up to the next entry's `least`."""

    least: int
    algorithm: str


@cache
def fastest(
    op: Op, *, ranks: int, cores: int, constants: Constants = REFERENCE
) -> tuple[Fastest, ...]:
    """Returns the algorithm with the shortest predicted time for each range of sizes: the lower
    envelope of the lines.

    >>> [name for _, name in fastest(Op.ALL_REDUCE, ranks=4, cores=2)]
    ['one_shot', 'direct']
    """
    lines: dict[str, CostLine] = {}
    for name in sorted(names(op), key=lambda name: (name not in _SIMPLE, name)):
        if find(op, name).for_hosts:
            continue  # this algorithm is only for ranks on several hosts
        try:
            lines[name] = line(op, name, ranks=ranks, cores=cores, constants=constants)
        except UnsupportedError:
            continue
    return envelope(lines)


def envelope(lines: Mapping[str, CostLine]) -> tuple[Fastest, ...]:
    """Returns the name of the lowest line for each range of sizes. Of equal lines, the first is
    chosen.

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
