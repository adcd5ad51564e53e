"""Measures two costs of the timeline: the time of one event, and the time that the timeline adds to
a training step.

*Event* is the CPU time of one call of `record`. *Step* trains a small model through
`data_parallel`. Steps with and without the timeline alternate in the same processes. On a busy
machine, the times of two steps differ by more than the cost of the timeline. The ratio of CPU times
does not depend on other programs.

    python benchmarks/timeline_cost.py                  # 2 ranks, about a minute
    python benchmarks/timeline_cost.py --rounds 5
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from timing import alternate, calls_within, microseconds, on_every, write

import unisono
from unisono.communicator.explain import time_s
from unisono.timeline import EventKind, TimelineWriter

WARM_UP_STEPS = 150  # includes the steps, at most 133, that tune the fusion
RUNS = 4000
_SUBMITTED = int(EventKind.SUBMITTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """Seconds per step of the slowest rank, one entry per round."""

    model: str
    ranks: int
    events_per_step: float
    with_s: tuple[float, ...]
    without_s: tuple[float, ...]
    event_ns: float
    """Nanoseconds of CPU time of one event, in a loop without other work."""
    cpu_s: float
    """Seconds of CPU time of a step without the timeline, the least of five measurements."""

    @property
    def paired(self) -> float:
        """Median ratio of the step time with the timeline to the step time without it."""
        pairs = zip(self.with_s, self.without_s, strict=True)
        return median(on / off for on, off in pairs)

    @property
    def counted(self) -> float:
        """Ratio of the CPU time of a step's events to the CPU time of the step."""
        return 1e-9 * self.event_ns * self.events_per_step / self.cpu_s


@contextmanager
def recording(events: int) -> Iterator[None]:
    """Sets the number of events that communicators record."""
    before = os.environ.get("UNISONO_TIMELINE_EVENTS")
    os.environ["UNISONO_TIMELINE_EVENTS"] = str(events)
    try:
        yield
    finally:
        del os.environ["UNISONO_TIMELINE_EVENTS"]
        if before is not None:
            os.environ["UNISONO_TIMELINE_EVENTS"] = before


def event_ns() -> float:
    """Returns the nanoseconds of CPU time of one event, the least of many short runs."""
    timeline = TimelineWriter(rank=0, size=1)
    names = [f"layers.{index}.weight" for index in range(50)]
    found: list[float] = []
    for _ in range(RUNS):
        began_s = time.thread_time()
        for name in names:
            timeline.record(_SUBMITTED, name, 0, 4096)
        found.append(time.thread_time() - began_s)
    return 1e9 * min(found) / len(names)


def least_cpu_s(step: Callable[[], object]) -> float:
    """Returns the seconds of CPU time of a step, the least of five measurements."""
    found: list[float] = []
    for _ in range(5):
        began_s = time.process_time()
        step()
        found.append(time.process_time() - began_s)
    return min(found)


def training_step(model: str, comm: unisono.Communicator) -> Callable[[], object]:
    """Returns a step of a small model through `data_parallel`."""
    import torch

    from unisono.parallel import data_parallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if model == "transformer":
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        inner: torch.nn.Module = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        x = torch.randn(4, 64, 64)
    else:
        inner = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8)))
        x = torch.randn(64, 128)
    wrapped = data_parallel(inner, comm)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()

    return step


def measure(rounds: int, round_s: float) -> list[CostRow]:
    """Measures both models with one number of ranks. Runs on every rank."""
    cost_ns = event_ns()
    rows: list[CostRow] = []
    with unisono.init() as comm:
        off_comm, on_comm = comm.split(0, comm.rank), comm.split(0, comm.rank)
        assert off_comm is not None and on_comm is not None
        for model in ("linear layers", "transformer"):
            rows.append(_row(model, (comm, on_comm, off_comm), rounds, round_s, cost_ns))
    return rows


def _row(
    model: str,
    comms: tuple[unisono.Communicator, unisono.Communicator, unisono.Communicator],
    rounds: int,
    round_s: float,
    cost_ns: float,
) -> CostRow:
    comm, on_comm, off_comm = comms
    silent = silenced(off_comm)
    on, off = training_step(model, on_comm), training_step(model, silent)
    for _ in range(WARM_UP_STEPS):
        on()
        off()
    begun = _recorded(on_comm)
    for _ in range(4):
        on()
    per_step = (_recorded(on_comm) - begun) / 4
    often = calls_within(round_s, time_s(comm, on, 2))
    with_s, without_s = alternate(comm, (on, off), (often, often), rounds)
    return CostRow(
        model=model,
        ranks=comm.size,
        events_per_step=per_step,
        with_s=with_s,
        without_s=without_s,
        event_ns=cost_ns,
        cpu_s=least_cpu_s(off),
    )


def silenced(comm: unisono.Communicator) -> unisono.Communicator:
    """Returns a communicator of the same ranks that records no events."""
    from unisono.timeline import SharedTimeline

    with recording(0):
        comm._timeline = SharedTimeline(rank=comm.rank, size=comm.size, job="silent")
        assert comm.timeline.path is None
    return comm


def _recorded(comm: unisono.Communicator) -> int:
    return int(comm.timeline.dump().events["sequence"][-1])


def render(rows: list[CostRow]) -> Table:
    """Returns a table with medians and quartiles over the rounds."""
    table = Table(title="us a step")
    table.add_column("model")
    names = ("ranks", "events a step", "ns an event", "with", "without", "with / without")
    for name in (*names, "CPU ms a step", "CPU time of events / step"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            str(row.ranks),
            f"{row.events_per_step:.0f}",
            f"{row.event_ns:.0f}",
            microseconds(row.with_s),
            microseconds(row.without_s),
            f"{row.paired:.4f}",
            f"{1e3 * row.cpu_s:.2f}",
            f"{row.counted:.3%}",
        )
    return table


def main(
    *,
    ranks: Annotated[str, typer.Option(help="Rank counts, separated by commas.")] = "1,2",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each kind.")] = 41,
    round_s: Annotated[float, typer.Option(help="Approximate seconds of a round.")] = 0.2,
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "timeline-cost.json",
) -> None:
    rows, probes_s = on_every(ranks, measure, (rounds, round_s))
    Console(width=130).print(render(rows))
    write(json_path, rows, probes_s)


if __name__ == "__main__":
    typer.run(main)
