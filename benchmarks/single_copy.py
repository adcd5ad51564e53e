"""Measures whether reads of a peer's memory (process_vm_readv) can be faster than copies through
staging.

Plain reads, which give the minimum time of a single copy, alternate with our own collectives in one
run. Every rank reads the bytes that the collective must deliver to this rank. All ranks read at the
same time, without a protocol. A real single-copy collective must also exchange addresses and
synchronise access to the memory.

    python benchmarks/single_copy.py                          # 2 and 4 ranks, about a minute
    python benchmarks/single_copy.py --ranks 2 --sizes 1M,16M
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from timing import alternate, calls_within, microseconds, on_every, write

import unisono
from unisono.bench.core_latency import describe_latency
from unisono.bench.sizes import format_size, parse_sizes
from unisono.communicator import Communicator
from unisono.communicator.explain import time_s

OPS = ("broadcast", "all_gather", "all_to_all")
PAGES = ("4K", "huge")
WINS = 1.1  # a protocol is worthwhile only if our call takes this many times a single copy's time
HUGE_PAGE = 2 << 20

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds per call of the slowest rank, one entry per round; `nbytes` is the size of the input
    or the output, whichever is larger.
    """

    op: str
    ranks: int
    nbytes: int
    pages: str
    read_s: tuple[float, ...]
    ours_s: tuple[float, ...]

    @property
    def gain(self) -> float:
        """Our time divided by the minimum time of a single copy."""
        return median(self.ours_s) / median(self.read_s)


# ---- code that runs on each rank


def memory(nbytes: int, pages: str) -> Bytes:
    """Returns zeroed memory on `huge` or on small pages."""
    region = mmap.mmap(-1, nbytes + 2 * HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE if pages == "huge" else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(region, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    found = whole[start : start + nbytes]
    found.fill(0)
    return found


def pattern(rank: int, start: int, count: int) -> Bytes:
    """Returns the initial contents of a rank's buffer."""
    period = np.arange(251, dtype=np.uint8)
    shift = (start + 31 * rank) % 251
    return np.tile(period, count // 251 + 2)[shift : shift + count]


class IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Buffers:
    """Buffers of a rank for calls of one size, and functions that fill them: our collectives, and
    reads of the peers' memory.
    """

    def __init__(self, comm: Communicator, nbytes: int, pages: str) -> None:
        self.comm = comm
        self.nbytes = nbytes
        self.piece = nbytes // comm.size
        self.x, self.out = memory(nbytes, pages), memory(nbytes, pages)
        own = np.array([os.getpid(), self.x.ctypes.data])
        self.peers = [tuple(map(int, row)) for row in comm.all_gather(own).reshape(-1, 2)]
        self.readv = ctypes.CDLL(None, use_errno=True).process_vm_readv

    def ours(self, op: str) -> Callable[[], object]:
        comm, x, out = self.comm, self.x, self.out
        if op == "broadcast":
            return lambda: comm.broadcast(x)
        if op == "all_gather":
            mine = x[: self.piece]
            return lambda: comm.all_gather(mine, out)
        return lambda: comm.all_to_all(x, out)

    def reading(self, op: str) -> Callable[[], object]:
        """Returns a function that performs this rank's reads and the copy of its own data."""
        me, piece = self.comm.rank, self.piece
        if op == "broadcast":
            return self._reads([(0, 0, self.x)] if me else [])
        sent = piece * me if op == "all_to_all" else 0
        reads = []
        for step in range(1, self.comm.size):  # this order distributes the reads over the peers
            peer = (me + step) % self.comm.size
            reads.append((peer, sent, self.out[peer * piece : (peer + 1) * piece]))
        read = self._reads(reads)
        own, place = self.x[sent : sent + piece], self.out[me * piece : (me + 1) * piece]

        def call() -> None:
            read()
            np.copyto(place, own)

        return call

    def _reads(self, reads: list[tuple[int, int, Bytes]]) -> Callable[[], None]:
        calls = []
        for peer, offset, target in reads:
            pid, address = self.peers[peer]
            vectors = (
                IoVector(target.ctypes.data, target.nbytes),
                IoVector(address + offset, target.nbytes),
            )
            local, remote = map(ctypes.pointer, vectors)
            calls.append((target.nbytes, (pid, local, 1, remote, 1, 0)))
        readv = self.readv

        def call() -> None:
            for nbytes, arguments in calls:
                if readv(*arguments) != nbytes:
                    raise OSError(ctypes.get_errno(), "process_vm_readv")

        return call

    def verify(self, op: str, call: Callable[[], object]) -> None:
        """Raises `AssertionError` if one call delivers wrong data."""
        me, size, piece = self.comm.rank, self.comm.size, self.piece
        self.x[:] = pattern(me, 0, self.nbytes)
        self.out.fill(255)
        self.comm.barrier()
        call()
        self.comm.barrier()
        if op == "broadcast":
            assert np.array_equal(self.x, pattern(0, 0, self.nbytes)), op
            return
        sent = piece * me if op == "all_to_all" else 0
        for peer, part in enumerate(self.out[: size * piece].reshape(size, piece)):
            assert np.array_equal(part, pattern(peer, sent, piece)), op


def measure(sizes: list[int], rounds: int, round_s: float) -> list[Row]:
    """Measures all table rows for one number of ranks. Every rank calls this function."""
    with unisono.init() as comm:
        return list(_rows(comm, sizes, rounds, round_s))


def _rows(comm: Communicator, sizes: list[int], rounds: int, round_s: float) -> Iterator[Row]:
    for pages in PAGES:
        for nbytes in sizes:
            buffers = Buffers(comm, nbytes, pages)
            for op in OPS:
                calls = (buffers.reading(op), buffers.ours(op))
                for call in calls:
                    buffers.verify(op, call)
                often = [calls_within(round_s, time_s(comm, call, 2)) for call in calls]
                read_s, ours_s = alternate(comm, calls, often, rounds)
                yield Row(
                    op=op, ranks=comm.size, nbytes=nbytes, pages=pages,
                    read_s=read_s, ours_s=ours_s,
                )  # fmt: skip
            comm.barrier()  # all ranks have finished their reads of this memory


# ---- the main program


def render(rows: list[Row], probes_s: list[float]) -> Table:
    """Returns a table with medians and quartiles over the rounds."""
    table = Table(title=f"us a call; cores {describe_latency(probes_s)} ns")
    for name in ("op", "ranks", "pages"):
        table.add_column(name)
    for name in ("bytes", "single copy, floor", "ours", "ours / floor"):
        table.add_column(name, justify="right")
    for row in rows:
        floor, ours = microseconds(row.read_s), microseconds(row.ours_s)
        gain = f"{row.gain:.2f}{' *' if row.gain > WINS else ''}"
        cells = (row.op, str(row.ranks), row.pages, format_size(row.nbytes), floor, ours, gain)
        table.add_row(*cells)
    return table


def main(
    *,
    ranks: Annotated[str, typer.Option(help="Rank counts, separated by commas.")] = "2,4",
    sizes: Annotated[
        str, typer.Option(help=("Message sizes, as for unisono bench."))
    ] = "64K,256K,1M,16M,64M",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each method.")] = 7,
    round_s: Annotated[float, typer.Option(help="Approximate seconds of a round.")] = 0.02,
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "single-copy.json",
) -> None:
    arguments = (list(parse_sizes(sizes)), rounds, round_s)
    rows, probes_s = on_every(ranks, measure, arguments)
    Console(width=120).print(
        render(rows, probes_s), "* the single copy is faster by more than 10 %"
    )
    write(json_path, rows, probes_s)


if __name__ == "__main__":
    typer.run(main)
