"""Writes docs/algorithms.md from the registry of algorithms: `python docs/algorithms_page.py`."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from unisono.algorithms import Algorithm, Cost, find, names
from unisono.algorithms.describe import describe
from unisono.types import Op

PAGE = Path(__file__).with_name("algorithms.md")
EXAMPLES = (8, 13)

_HEAD = """# Algorithms
`python docs/algorithms_page.py` generates this page from `unisono.algorithms`. The numbers come
from `unisono.algorithms.cost`. The tests compare them with the schedules.

n is the number of ranks. N is the number of bytes of a rank's whole vector, including all parts.
The tables list for each algorithm the rounds, the bytes that the busiest rank sends (counted once
per receiver), and the bytes that the busiest rank reduces. The last columns are rounds / bytes /
reductions for {examples} ranks, in multiples of N; ≤ marks an upper bound. m is the largest power
of two that is at most n, and e = n - m. The algorithm's file in `src/unisono/algorithms/`
explains other letters.

A string names an algorithm in `unisono.algorithms.build`, in `comm.all_reduce(x, algorithm=...)`
and on the command line:

| string | meaning |
|---|---|
| `ring` | a name in the tables below |
| `k_nomial:8`, `bruck:radix=3` | an algorithm with parameters, by position or by name |
| `bucket:4x4`, `swing:4x4` | an algorithm on a grid of ranks, the fastest axis first |
| `ring:channels=2` | any algorithm, on several shares of the vector at once |
| `direct:block_bytes=65536` | any algorithm, with a block size in bytes |
| `reduce_broadcast:reduce=chain,broadcast=direct` | an algorithm for each phase |
| `level0:mesh@4;level1:ring@2` | an algorithm per level, innermost first, with its ranks |
| `level0:mesh;level1:H-D_R` | HCCL's syntax and names; without `@`, the levels follow the hosts |
| `by_host`, `leaders`, `rank_order` | algorithms for several hosts: `hosts=((0, 1), (2,))` |
"""


def page() -> str:
    """Returns the text of `docs/algorithms.md`."""
    examples = " and ".join(map(str, EXAMPLES))
    parts = [_HEAD.format(examples=examples), *(section for op in Op for section in _section(op))]
    return "\n".join(parts) + "\n"


def _section(op: Op) -> Iterator[str]:
    found = [find(op, name) for name in names(op)]
    if not found:
        return
    yield f"## {op}"
    examples = "".join(f" {n} ranks |" for n in EXAMPLES)
    yield f"| algorithm | rounds | bytes | reductions |{examples}"
    yield "|---|---|---|---|" + "---|" * len(EXAMPLES)
    for algorithm in found:
        about = describe(algorithm)
        cells = [_usage(algorithm), about.rounds, about.bytes_sent, about.reductions or "none"]
        cells += [_numbers(algorithm, n) for n in EXAMPLES]
        yield f"| {' | '.join(cells)} |"
    yield ""
    for algorithm in found:
        about = describe(algorithm)
        source = f" Source: {about.source}." if about.source else ""
        yield f"- `{algorithm.name}`: {about.summary}{source}"
    yield ""


def _usage(algorithm: Algorithm) -> str:
    shown = [p for p in algorithm.parameters if p.name != "levels"]
    defaults = [p.name if p.default is None else f"{p.name}={p.default}" for p in shown]
    return f"`{algorithm.name}`" + (f" ({', '.join(defaults)})" if defaults else "")


def _numbers(algorithm: Algorithm, ranks: int) -> str:
    cost: Cost = algorithm.cost(ranks=ranks)
    bound = "" if algorithm.exact else "≤"
    amounts = [bound + _decimal(amount) for amount in (cost.bytes_sent, cost.reductions)]
    return " / ".join([str(cost.rounds), *amounts])


def _decimal(amount: Fraction) -> str:
    return f"{float(amount):.3f}".rstrip("0").rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(page())
