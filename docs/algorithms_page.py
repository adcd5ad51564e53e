"""Writes docs/algorithms.md from the registry: `python docs/algorithms_page.py`."""

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
Made by `python docs/algorithms_page.py` from `unisono.algorithms`; the numbers are those of
`unisono.algorithms.cost`, which the tests compare with what each schedule does.

n is the number of ranks, N the bytes of a rank's whole vector (of all its pieces together). For
each algorithm: the rounds; the bytes that the busiest rank sends, counted once per receiver; the
bytes that the busiest rank reduces. The last columns are rounds / bytes / reductions for {examples}
ranks, in multiples of N; ≤ marks an upper bound. m is the largest power of two in n, and e = n - m;
other letters are explained in the file of the algorithm, `src/unisono/algorithms/`.

An algorithm is named by a string, the same for `unisono.algorithms.build`, `comm.all_reduce(x,
algorithm=...)` and the command line:

| written | meaning |
|---|---|
| `ring` | a name of the tables below |
| `k_nomial:8`, `bruck:radix=3` | with its parameters, in order or by name |
| `bucket:4x4`, `swing:4x4` | on a grid of ranks, the fastest axis first |
| `ring:channels=2` | any algorithm on so many shares of the vector at the same time |
| `direct:block_bytes=65536` | any algorithm, staged in blocks of so many bytes of the message |
| `reduce_broadcast:reduce=chain,broadcast=direct` | an algorithm for each phase |
| `level0:mesh@4;level1:ring@2` | an algorithm for each level, innermost first, with its ranks |
| `level0:mesh;level1:H-D_R` | HCCL's syntax and names; sizes as told, or of the hosts, or equal |
| `by_host`, `leaders`, `rank_order` | for ranks on hosts like `hosts=((0, 1), (2,))` |
"""


def page() -> str:
    """The whole page."""
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
