"""Measures how soon the controller tells all ranks about a mismatch, a stall, and a lost rank.

The clock starts when the failure happens: the last rank submits the wrong tensor, the limit of a
stall passes, or a rank is killed. It ends when the slowest other rank has the error or the warning.

    python benchmarks/controller_failures.py            # 2 and 4 ranks, about 1 minute
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from timing import write

import unisono
from unisono.bench.core_latency import probe_core_latency_s

STALL_S, TRANSFER_S, ROUNDS = 0.3, 0.05, 7
LARGE = 8 << 20  # elements of the array whose transfer a rank's death interrupts


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds until the slowest rank knew, one for each round."""

    case: str
    ranks: int
    seconds: list[float]


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank of a case: its controller, and the shared time at which the failure happened."""

    comm: Any
    controller: Any
    happened_s: Any

    @property
    def is_last(self) -> bool:
        return bool(self.comm.rank == self.comm.size - 1)


def _mismatch(place: _Place) -> float:
    """Returns when the error arrived; the group must then still work."""
    kind = np.float32 if place.is_last else np.float64
    if place.is_last:
        time.sleep(0.05)
        place.happened_s.value = time.monotonic()
    try:
        place.controller.all_reduce("wrong", np.ones(10, kind)).wait()
    except unisono.MismatchError as error:
        told_s = time.monotonic()
        assert "float32" in str(error) and "float64" in str(error), error
    assert place.controller.all_reduce("right", np.ones(1)).wait()[0] == place.comm.size
    return told_s


def _stall(place: _Place) -> float:
    """Returns when the warning arrived about the rank that has not submitted."""
    heard: SimpleQueue[tuple[float, str]] = SimpleQueue()
    handler = logging.Handler()
    handler.emit = lambda record: heard.put((time.monotonic(), record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("unisono.controller").addHandler(handler)
    if not place.is_last:
        place.happened_s.value = time.monotonic() + STALL_S
        handle = place.controller.all_reduce("late", np.ones(1))
        threading.Thread(target=handle.wait).start()  # a wait notices the stall
    told_s, text = heard.get(timeout=10)
    assert f"{place.comm.size - 1}" in text and "late" in text, text
    place.comm.barrier()
    if place.is_last:
        place.controller.all_reduce("late", np.ones(1)).wait()
    place.comm.barrier()
    return told_s


def _lost_in_negotiation(place: _Place) -> float:
    """Returns when the loss was told of a rank that never submitted the tensor."""
    if place.is_last:
        time.sleep(0.05)
        _die(place)
    return _lost(lambda: place.controller.all_reduce("new", np.ones(1)).wait())


def _lost_in_transfer(place: _Place) -> float:
    """Returns when the loss was told of a rank that died while the tensor moved."""
    array = np.ones(LARGE)
    if place.is_last:
        threading.Timer(TRANSFER_S, _die, (place,)).start()

    def forever() -> None:
        while True:
            place.controller.all_reduce("large", array).wait()

    return _lost(forever)


def _die(place: _Place) -> None:
    place.happened_s.value = time.monotonic()
    os.kill(os.getpid(), signal.SIGKILL)


def _lost(act: Callable[[], object]) -> float:
    try:
        act()
    except unisono.PeerLostError:
        return time.monotonic()
    raise AssertionError("expected PeerLostError")


CASES: dict[str, Callable[[_Place], float]] = {
    "mismatch": _mismatch,
    "stall": _stall,
    "rank lost in negotiation": _lost_in_negotiation,
    "rank lost in transfer": _lost_in_transfer,
}


def _rank(case: str, rank: int, size: int, rendezvous: str, happened_s: Any, told: Any) -> None:
    with unisono.init(rank=rank, size=size, rendezvous=rendezvous) as comm:
        controller = unisono.Controller(comm, stall_warning_s=STALL_S, tune_fusion=False)
        for _ in range(10):
            controller.all_reduce("warm-up", np.ones(10)).wait()
        comm.barrier()
        told.put(CASES[case](_Place(comm, controller, happened_s)))
        if not case.startswith("rank lost"):
            comm.barrier()
            controller.close()


def _round(case: str, size: int) -> float:
    """Returns the seconds until the slowest rank that lives knew."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["unisono", "unisono.controller"])
    happened_s, told = context.Value("d", 0.0), context.Queue()
    rendezvous = f"failures-{secrets.token_hex(8)}"
    ranks = [
        context.Process(target=_rank, args=(case, rank, size, rendezvous, happened_s, told))
        for rank in range(size)
    ]
    for each in ranks:
        each.start()
    expected = size - 1 if case.startswith("rank lost") else size
    times = [told.get(timeout=60) for _ in range(expected)]
    for each in ranks:
        each.join(30)
    return float(max(times) - happened_s.value)


def render(rows: list[Row]) -> Table:
    """Returns a table with the median and the largest time of each case."""
    table = Table(title="milliseconds until all ranks knew")
    for name in ("case", "ranks", "median", "largest"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        found = sorted(row.seconds)
        cells = (f"{1e3 * found[len(found) // 2]:.1f}", f"{1e3 * found[-1]:.1f}")
        table.add_row(row.case, str(row.ranks), *cells)
    return table


def main(
    *,
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "controller-failures.json",
) -> None:
    """Measures all cases, prints a table, and writes the document."""
    probe_s = probe_core_latency_s()
    rows = [
        Row(case=case, ranks=ranks, seconds=[_round(case, ranks) for _ in range(ROUNDS)])
        for ranks in (2, 4)
        for case in CASES
    ]
    Console().print(render(rows))
    write(json_path, rows, [] if probe_s is None else [probe_s])


if __name__ == "__main__":
    typer.run(main)
