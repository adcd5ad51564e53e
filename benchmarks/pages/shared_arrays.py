"""The part of the results about arrays of `Communicator.empty`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from pages.target_rows import HEAD, target_row
from unisono.bench.contestants import INTEL, KERNELS, SHARED, STREAMING
from unisono.bench.core_latency import describe_latency
from unisono.bench.sizes import format_size

MOST = 1.3
LEAST_BYTES = {"all_reduce": 256 << 10}
"""Least bytes for which the target holds, by operation; otherwise 1 MiB."""
_LIMITS = (KERNELS, STREAMING)
_STATES = {False: "input unchanged", True: "input written before each call"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRow:
    """The times of one case, by contestant, in seconds of each round."""

    op: str
    ranks: int
    size_bytes: int
    rewritten: bool
    times_s: dict[str, Sequence[float]]
    wrong: int
    core: str
    """Latency between the cores during the row, such as "50 near"."""

    @property
    def limit_s(self) -> float:
        """Median of the faster of the two ways to store."""
        return min(median(self.times_s[name]) for name in _LIMITS)

    @property
    def mode(self) -> str:
        """near, far or mixed."""
        return self.core.rpartition(" ")[2]

    @property
    def over_limit(self) -> float:
        return median(self.times_s[SHARED]) / self.limit_s


def render_shared_arrays(document: dict[str, Any]) -> list[str]:
    """Renders the JSON results of `shared_arrays.py` as Markdown."""
    runs = document["runs"]
    rows = [row for run in runs for row in _rows(run)]
    lines = [*_preface(runs[0]), "", *HEAD, *_targets(rows)]
    for ranks, rewritten in dict.fromkeys((row.ranks, row.rewritten) for row in rows):
        chosen = [row for row in rows if (row.ranks, row.rewritten) == (ranks, rewritten)]
        lines += ["", f"{ranks} ranks, {_STATES[rewritten]}:", "", *_table(chosen)]
    return lines


def _rows(run: dict[str, Any]) -> Iterator[SharedRow]:
    for row in run["rows"]:
        results = row["results"]
        yield SharedRow(
            op=row["op"],
            ranks=row["ranks"],
            size_bytes=row["size_bytes"],
            rewritten=run["settings"].get("rewritten", False),
            times_s={name: found["times_s"] for name, found in results.items() if found["times_s"]},
            wrong=sum(found["wrong"] for found in results.values()),
            core=describe_latency(row["probes_s"]),
        )


def _preface(run: dict[str, Any]) -> list[str]:
    version = run["machine"]["packages"].get(INTEL)
    intel = [f"`impi` is Intel MPI {version} with its defaults and `I_MPI_FABRICS=shm`."]
    return [
        "`python benchmarks/shared_arrays.py`: `unisono-shared` has arrays of",
        "`Communicator.empty`, `unisono` has ordinary arrays. All contestants of a row alternate",
        "in one run, with rank r on core r mod cores. Every result was verified. Microseconds:",
        f"medians of {run['settings']['rounds']} rounds (quartiles).",
        *(intel if version else []),
        "",
        "The limit: all ranks at once read every byte that the operation must read, and write",
        "every byte that it must write, in their own memory, with Unisono's copies and reductions.",
        "With N bytes on n ranks, every rank copies N (broadcast: every rank but the root), or",
        "sums n parts of N/n (reduce_scatter). The limit is the faster of ordinary stores and",
        "stores that bypass the caches.",
        "",
        "Input unchanged: successive calls; a call finds in the caches what the previous one left",
        "there. Input written before each call, as in a training step: each rank writes its input",
        "and waits for the others, and these times do not count. A call then takes from the first",
        "rank's start to the last rank's end, and a round is the median of its calls. This",
        "includes about a microsecond in which the ranks leave the barrier, for the limit too.",
        "",
        "`core` is the one-way latency between the two cores in ns, which the host of this",
        "virtual machine changes: near or far. Between far cores, lines that their owner has just",
        "written arrive slowly. The limit does not contain this time, since each rank reads its",
        "own memory.",
    ]


def _targets(rows: list[SharedRow]) -> Iterator[str]:
    kinds = dict.fromkeys((row.op, row.ranks, row.rewritten, row.mode) for row in rows)
    for op, ranks, rewritten, mode in kinds:
        least = LEAST_BYTES.get(op, 1 << 20)
        chosen = [
            row
            for row in rows
            if (row.op, row.ranks, row.rewritten, row.mode) == (op, ranks, rewritten, mode)
            and row.size_bytes >= least
            and SHARED in row.times_s
        ]
        if not chosen:
            continue
        worst = max(chosen, key=lambda row: row.over_limit)
        kind = f"{op} from {format_size(least)}, n = {ranks}, {_STATES[rewritten]}"
        name = f"{kind}, cores {mode}: over the limit of {len(chosen)} rows"
        shown = f"{worst.over_limit:.2f} ({format_size(worst.size_bytes)})"
        right = not any(row.wrong for row in chosen)
        yield target_row(name, f"<= {MOST:g}", shown, right and worst.over_limit <= MOST)


def _table(rows: list[SharedRow]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row.times_s if name not in _LIMITS))
    peers = [name for name in names if name != SHARED]
    head = ["operation", "size", *names, "limit", "shared / limit"]
    head += [*(f"{peer} / shared" for peer in peers), "core"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row.op, format_size(row.size_bytes)]
        cells += [_spread(row.times_s.get(name)) for name in names]
        cells.append(f"{1e6 * row.limit_s:.2f}")
        ours = row.times_s.get(SHARED)
        cells.append(f"{row.over_limit:.2f}" if ours else "-")
        cells += [*(_ratio(row.times_s.get(peer), ours) for peer in peers), row.core]
        lines.append(f"| {' | '.join(cells)} |" + (" **wrong**" if row.wrong else ""))
    return lines


def _ratio(theirs: Sequence[float] | None, ours: Sequence[float] | None) -> str:
    return f"{median(theirs) / median(ours):.2f}" if theirs and ours else "-"


def _spread(times_s: Sequence[float] | None) -> str:
    if not times_s:
        return "-"
    if len(times_s) < 2:
        return f"{1e6 * times_s[0]:.4g}"
    first, _, third = quantiles(times_s, n=4, method="inclusive")
    low, middle, high = (f"{1e6 * each:.4g}" for each in (first, median(times_s), third))
    return f"{middle} ({low}-{high})"
