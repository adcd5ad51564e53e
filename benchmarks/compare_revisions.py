"""Compares the collectives of two source trees, alternating, to find slowdowns.

    git worktree add ../before REVISION && make -C ../before demo   # builds it
    python benchmarks/compare_revisions.py ../before  # 2 and 4 ranks, 8 minutes

Ranks of both trees run all the time; the ranks of the tree that is not measured sleep. With a
folder as argument, this file is the program that `unisono.run` starts in a tree; it runs the
requests in the folder's pipes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TextIO

import numpy as np
import typer
from rich.console import Console

import unisono
from unisono.bench.sizes import format_size, parse_sizes

HERE = Path(__file__).parent
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
THIS, OTHER = "this", "other"
ROUND_S, MOST_CALLS = 0.06, 20_000


class Ranks:
    """The ranks of one source tree. They all run the same request at the same time."""

    def __init__(self, tree: Path, folder: Path, ranks: int) -> None:
        self._ranks = range(ranks)
        for rank in self._ranks:
            for end in ("asked", "found"):
                os.mkfifo(folder / f"{end}{rank}")
        python = tree / ".venv" / "bin" / "python"
        words = [str(python), str(Path(__file__).resolve()), "--as-ranks", str(folder), str(ranks)]
        self._process = subprocess.Popen(words, cwd=tree)
        self._asked: list[TextIO] = [(folder / f"asked{r}").open("w", 1) for r in self._ranks]
        self._found: list[TextIO] = [(folder / f"found{r}").open() for r in self._ranks]

    def time_calls(self, op: str, nbytes: int, calls: int) -> tuple[float, int]:
        """Returns the seconds per call on the slowest rank, and the number of ranks with a wrong
        result.
        """
        for asked in self._asked:
            asked.write(f"{op} {nbytes} {calls}\n")
        said = [found.readline().split() for found in self._found]
        return max(float(one[0]) for one in said), sum(int(one[1]) for one in said)

    def end(self) -> None:
        for asked in self._asked:
            with suppress(OSError):
                asked.close()
        self._process.wait()


@contextmanager
def _both(other: Path, ranks: int) -> Iterator[dict[str, Ranks]]:
    with tempfile.TemporaryDirectory() as folder:
        started = {}
        for name, tree in ((THIS, HERE.parent), (OTHER, other)):
            place = Path(folder) / name
            place.mkdir()
            started[name] = Ranks(tree, place, ranks)
        try:
            yield started
        finally:
            for each in started.values():
                each.end()


def _row(both: dict[str, Ranks], op: str, nbytes: int, rounds: int) -> dict[str, Any]:
    """Measures one case in rounds. The tree that is measured first alternates."""
    call_s = min(each.time_calls(op, nbytes, 10)[0] for each in both.values())
    calls = max(5, min(MOST_CALLS, int(ROUND_S / call_s)))
    times: dict[str, list[float]] = {name: [] for name in both}
    wrong = 0
    for round_ in range(rounds + 1):  # the first round is a warm-up
        for name in both if round_ % 2 else reversed(both):
            call_s, mistakes = both[name].time_calls(op, nbytes, calls)
            wrong += mistakes
            if round_ > 0:
                times[name].append(call_s)
    return {"op": op, "size_bytes": nbytes, "times_s": times, "wrong": wrong}


def main(
    other: Annotated[Path, typer.Argument(help="The other tree, built, with its .venv.")],
    *,
    ranks: Annotated[str, typer.Option(help="Rank counts, separated by commas.")] = "2,4",
    sizes: Annotated[
        str, typer.Option(help=("Message sizes, as for unisono bench."))
    ] = "8,1K,16K,128K,1M,8M,64M",
    ops: Annotated[str, typer.Option(help="Operations, separated by commas.")] = ",".join(OPS),
    rounds: Annotated[int, typer.Option(help="Rounds of each tree.")] = 11,
    path: Annotated[Path, typer.Option(help="Results.")] = HERE / "results" / "trees.json",
) -> None:
    from unisono.bench.machine_facts import describe_machine  # an older tree may lack this function

    console = Console(stderr=True)
    words = ["git", "-C", str(other), "describe", "--always"]
    revision = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    rows = []
    for count in map(int, ranks.split(",")):
        with _both(other.resolve(), count) as both:
            for op in ops.split(","):
                for nbytes in parse_sizes(sizes):
                    row = {"ranks": count, **_row(both, op, nbytes, rounds)}
                    rows.append(row)
                    this, that = (median(row["times_s"][name]) for name in (THIS, OTHER))
                    size = format_size(nbytes)
                    console.print(f"{count} {op} {size}: {this * 1e6:.2f} us, {that / this:.2f}")
    document = {"machine": describe_machine(), "other": revision, "rounds": rounds, "rows": rows}
    path.write_text(json.dumps(document, indent=1) + "\n")


# ---- the ranks of a tree, which may be an older tree


def _call(comm: Any, op: str, nbytes: int) -> tuple[Any, Any]:
    """Returns a function that performs the call, and a function that checks its result."""
    n = comm.size
    size = max(nbytes // 4, n) // n * n
    full, share = np.zeros(size, np.float32), np.zeros(size // n, np.float32)
    # The timed all_reduce is in place. It sums zeros, since other values would grow with each call.
    if op == "all_reduce":
        full[:] = 1
        right = bool((comm.all_reduce(full) == n).all())
        full[:] = 0
        return (lambda: comm.all_reduce(full)), lambda: right and not full.any()
    if op == "broadcast":
        full[:] = comm.rank + 1
        return (lambda: comm.broadcast(full, 0)), lambda: bool((full == 1).all())
    if op == "reduce_scatter":
        full[:] = 1
        return (lambda: comm.reduce_scatter(full, share)), lambda: bool((share == n).all())
    if op == "all_gather":
        share[:] = comm.rank + 1
        wanted = np.repeat(np.arange(1, n + 1, dtype=np.float32), size // n)
        return (lambda: comm.all_gather(share, full)), lambda: np.array_equal(full, wanted)
    full[:] = comm.rank + 1
    out, wanted = np.zeros_like(full), np.repeat(np.arange(1, n + 1, dtype=np.float32), size // n)
    return (lambda: comm.all_to_all(full, out)), lambda: np.array_equal(out, wanted)


def serve(folder: str, ranks: int) -> None:
    """Runs the requests from the pipes on each rank."""
    comm = unisono.init()
    place, known = Path(folder), None
    with (place / f"asked{comm.rank}").open() as asked:
        found = (place / f"found{comm.rank}").open("w", 1)
        for line in asked:
            op, nbytes, calls = line.split()
            if known != (op, nbytes):
                known = op, nbytes
                call, check = _call(comm, op, int(nbytes))
            for _ in range(max(2, int(calls) // 10)):
                call()
            comm.barrier()
            began = time.perf_counter()
            for _ in range(int(calls)):
                call()
            took_s = (time.perf_counter() - began) / int(calls)
            found.write(f"{took_s} {int(not check())}\n")
        found.close()
    comm.barrier()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-ranks"]:
        unisono.run(serve, int(sys.argv[3]), args=(sys.argv[2], int(sys.argv[3])))
    else:
        typer.run(main)
