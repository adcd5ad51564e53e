"""Rules that select the algorithm of a call. A call uses the first rule that matches it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log

from unisono import algorithms
from unisono.errors import UnsupportedError
from unisono.types import DType, Op

_BLOCK_UNIT_BYTES = 4096
_DTYPE_BYTES = sorted({dtype.size_bytes for dtype in DType})
_FEW_BYTES = 4 << 10
_FEW_BYTES_CROWDED = 16 << 10
_DIRECT_SCAN_BYTES = 64 << 10
_MOST_RANKS = 8


@dataclass(frozen=True, slots=True)
class IntRange:
    """Whole numbers from `least` to `most`, without an upper limit if `most` is None.

    >>> short = IntRange(0, 4096)
    >>> 4096 in short, 4097 in short, str(short), str(IntRange(2, 2))
    (True, False, 'up to 4096', '2')
    """

    least: int = 0
    most: int | None = None

    def __post_init__(self) -> None:
        if self.least < 0 or (self.most is not None and self.most < self.least):
            raise UnsupportedError(f"empty or negative range: {self.least} to {self.most}")

    def __contains__(self, number: int) -> bool:
        return self.least <= number and (self.most is None or number <= self.most)

    def __str__(self) -> str:
        if self.most is None:
            return f"{self.least} or more" if self.least else "any"
        if self.least == self.most:
            return str(self.least)
        return f"{self.least} to {self.most}" if self.least else f"up to {self.most}"


ANY = IntRange()
_ONE_HOST = IntRange(1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule: calls of `op` within all these limits use `algorithm`.

    `nbytes` limits the size of the larger of the caller's input and output. `dtype_bytes` is the
    size of one element, or None for any type. The algorithm may include `channels=k`. `block_bytes`
    is the part of the message that is staged at a time; with None, the executor decides. Raises
    `UnsupportedError` for unknown algorithms and invalid sizes.

    >>> sizes, ranks = IntRange(0, 4096), IntRange(2, 2)
    >>> rule = Rule(op=Op.ALL_REDUCE, algorithm="one_shot", nbytes=sizes, ranks=ranks)
    >>> print(rule)
    all_reduce, up to 4096 bytes, 2 ranks: one_shot
    >>> rule.serves(Op.ALL_REDUCE, 64, ranks=2), rule.serves(Op.ALL_REDUCE, 64, ranks=4)
    (True, False)
    """

    op: Op
    algorithm: str
    nbytes: IntRange = ANY
    ranks: IntRange = ANY
    hosts: IntRange = ANY
    dtype_bytes: int | None = None
    block_bytes: int | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        algorithms.find(self.op, self.algorithm)
        if self.dtype_bytes is not None and self.dtype_bytes not in _DTYPE_BYTES:
            raise UnsupportedError(
                f"dtype_bytes: expected one of {_DTYPE_BYTES}, got {self.dtype_bytes}"
            )
        block = self.block_bytes
        if block is not None and (block < _BLOCK_UNIT_BYTES or block % _BLOCK_UNIT_BYTES):
            raise UnsupportedError(
                f"block_bytes: expected a multiple of {_BLOCK_UNIT_BYTES}, got {block}"
            )

    def serves(
        self, op: Op, nbytes: int, *, ranks: int, hosts: int = 1, dtype_bytes: int | None = None
    ) -> bool:
        """Returns True if the rule matches. A rule for one element size matches only calls of this
        `dtype_bytes`.
        """
        return (
            op is self.op
            and nbytes in self.nbytes
            and ranks in self.ranks
            and hosts in self.hosts
            and (self.dtype_bytes is None or self.dtype_bytes == dtype_bytes)
        )

    def __str__(self) -> str:
        limits = [
            f"{span} {unit.removesuffix('s') if str(span) == '1' else unit}"
            for span, unit in ((self.nbytes, "bytes"), (self.ranks, "ranks"), (self.hosts, "hosts"))
            if span != ANY
        ]
        if self.dtype_bytes is not None:
            limits.append(f"{self.dtype_bytes}-byte elements")
        block = f" in blocks of {self.block_bytes}" if self.block_bytes is not None else ""
        return f"{', '.join([self.op.value, *limits])}: {self.algorithm}{block}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Median time of one call, in seconds, on the machine where the table was measured."""

    op: Op
    ranks: int
    nbytes: int
    algorithm: str
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rules in order of precedence, and the measurements from which they come, if any.

    >>> ring = Selection(rules=(Rule(op=Op.ALL_REDUCE, algorithm="ring"),))
    >>> ring.choose(Op.ALL_REDUCE, 1024, ranks=4).algorithm
    'ring'
    >>> ring.choose(Op.BROADCAST, 1024, ranks=4) is None
    True
    """

    rules: tuple[Rule, ...] = ()
    measured: tuple[Measured, ...] = ()

    def choose(
        self, op: Op, nbytes: int, *, ranks: int, hosts: int = 1, dtype_bytes: int | None = None
    ) -> Rule | None:
        """Returns the first rule that matches the call, or None."""
        for rule in self.rules:
            if rule.serves(op, nbytes, ranks=ranks, hosts=hosts, dtype_bytes=dtype_bytes):
                return rule
        return None

    def times_s(self, op: Op, nbytes: int, ranks: int) -> dict[str, float]:
        """Returns the measured seconds of each algorithm.

        Between two measured sizes, the logarithm of the time is interpolated linearly in the
        logarithm of the size. Sizes outside the measured range give no result.
        """
        curves: dict[str, dict[int, float]] = {}
        for one in self.measured:
            if one.op is op and one.ranks == ranks:
                curves.setdefault(one.algorithm, {})[one.nbytes] = one.time_s
        found = ((name, _interpolate(curve, nbytes)) for name, curve in curves.items())
        return {name: time_s for name, time_s in found if time_s is not None}


def _interpolate(curve: dict[int, float], nbytes: int) -> float | None:
    if nbytes in curve:
        return curve[nbytes]
    below = max((size for size in curve if 0 < size < nbytes), default=None)
    above = min((size for size in curve if size > nbytes), default=None)
    if below is None or above is None:
        return None
    share = log(nbytes / below) / log(above / below)
    return float(curve[below] * (curve[above] / curve[below]) ** share)


def _built_in() -> Iterator[Rule]:
    few = "each rank reads all contributions: one exchange, fewest switches between ranks"
    many = "each rank reduces its share: fewest bytes per rank"
    prefixes = "each rank reads the contributions of all lower ranks: one exchange"
    pipeline = "the prefix passes from rank to rank in parts: fewest bytes per rank"
    straight = "one exchange: each byte is written once and read by each receiver"
    pair, several, all_ranks = IntRange(0, 2), IntRange(3, _MOST_RANKS), IntRange(0, _MOST_RANKS)
    for ranks, most in ((pair, _FEW_BYTES), (several, _FEW_BYTES_CROWDED)):
        short = IntRange(0, most)
        yield Rule(op=Op.ALL_REDUCE, algorithm="one_shot", nbytes=short, ranks=ranks, reason=few)
        yield Rule(op=Op.REDUCE, algorithm="direct", nbytes=short, ranks=ranks, reason=few)
    yield Rule(op=Op.ALL_REDUCE, algorithm="direct", ranks=all_ranks, reason=many)
    yield Rule(op=Op.REDUCE, algorithm="reduce_scatter_gather", ranks=all_ranks, reason=many)
    for least, ranks in ((256 << 10, pair), (128 << 10, several)):
        algorithm, reason = "direct:channels=4", "readers start after a quarter of a block"
        nbytes = IntRange(least)
        yield Rule(op=Op.BROADCAST, algorithm=algorithm, nbytes=nbytes, ranks=ranks, reason=reason)
    for op in (Op.SCAN, Op.EXSCAN):
        short = IntRange(0, _DIRECT_SCAN_BYTES)
        yield Rule(op=op, algorithm="direct", nbytes=short, ranks=all_ranks, reason=prefixes)
        for narrow in (1, 2):  # bytes of an element
            unwidened = "a chain would convert sums of narrow floats to float32"
            yield Rule(
                op=op, algorithm="direct", ranks=all_ranks, dtype_bytes=narrow, reason=unwidened
            )
        yield Rule(op=op, algorithm="chain", ranks=all_ranks, reason=pipeline)
    for op in Op:
        if op not in (Op.ALL_REDUCE, Op.REDUCE, Op.SCAN, Op.EXSCAN):
            yield Rule(op=op, algorithm="direct", ranks=all_ranks, reason=straight)


BUILT_IN = Selection(rules=tuple(replace(rule, hosts=_ONE_HOST) for rule in _built_in()))
"""Rules from measurements of up to 8 ranks on one host.

For small messages, where switches between ranks cost more than bytes, all ranks exchange everything
in one step. For larger messages, each rank reduces a share. Several hosts have no built-in rules,
because only the cost model knows the hosts of the ranks.
"""
