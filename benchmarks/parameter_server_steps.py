"""Compares two kinds of training steps: one uses a parameter server, the other a ring all_reduce.

Every contestant trains the same model on the same four workers. The contestants are the ring and
parameter servers with 1, 2 and 4 servers, on workers or on dedicated ranks. They alternate. Before
the measurement, the parameters of all workers are compared bit by bit with training by all_reduces
in rank order, as a reproducible communicator performs them. The program counts the bytes, which
must equal the closed form.

The bound of a contestant is the number of bytes that its busiest rank sends, over the rate of a
link. The busiest rank receives equally many bytes at the same time. The rate is measured in the
same run, by a message in one direction.

    python benchmarks/parameter_server_steps.py              # hosts of a lab; root; three minutes
    python benchmarks/parameter_server_steps.py --one-host   # this machine's shared memory
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from timing import microseconds, write
from torch import nn

import unisono
from unisono.bench.lab import EVEN, Lab
from unisono.bench.sizes import format_size, parse_sizes
from unisono.communicator import Communicator
from unisono.communicator.explain import time_s
from unisono.parallel import ParameterServer

WORKERS = 4
SERVERS = (1, 2, 4)
LAYERS = 7
CHECKED_STEPS = 3
PORT = 29_411
BAR = 1.3

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """The ring (0 servers) or a parameter server."""

    servers: int = 0
    dedicated: bool = False

    def __str__(self) -> str:
        if not self.servers:
            return "ring"
        return f"{self.servers} {'dedicated' if self.dedicated else 'on workers'}"

    @property
    def ranks(self) -> int:
        """Number of ranks that take part."""
        return WORKERS + (self.servers if self.dedicated else 0)

    def busiest_bytes(self, nbytes: int) -> float:
        """Returns the number of bytes that the busiest rank sends in a step.

        It receives the same number.
        """
        if not self.servers:
            return 2 * (WORKERS - 1) / WORKERS * nbytes
        if self.dedicated:
            return max(nbytes, WORKERS * nbytes / self.servers)
        return max(nbytes, (WORKERS + self.servers - 2) * nbytes / self.servers)


CONTESTANTS = (
    Contestant(),
    *(Contestant(servers=s, dedicated=d) for d in (False, True) for s in SERVERS),
)
RANKS = max(contestant.ranks for contestant in CONTESTANTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds per step of the slowest worker, one entry per round."""

    name: str
    nbytes: int
    busiest_bytes: float
    """Bytes of the busiest rank by the closed form, which equals the counted bytes."""
    bound_s: float
    times_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median step time divided by the bound, the time of the busiest rank's bytes on a link."""
        return median(self.times_s) / self.bound_s


# ---- code that runs on each rank


def make_model(nbytes: int) -> nn.ParameterList:
    """Returns layers of different lengths, with `nbytes` bytes in total."""
    cuts = np.linspace(0, nbytes // 4, LAYERS + 1).astype(int)
    return nn.ParameterList([torch.zeros(b - a) for a, b in pairwise(cuts)])


def set_gradients(model: nn.ParameterList, rank: int, step: int) -> None:
    """Sets gradients whose rounded sum depends on the order of the additions."""
    rng = np.random.default_rng([rank, step])
    for parameter in model:
        values = rng.standard_normal(len(parameter), np.float32)
        parameter.grad = torch.from_numpy(np.ldexp(values, rng.integers(-8, 8, len(parameter))))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.01, momentum=0.9)


class AllReduceTraining:
    """A training step: an all_reduce of all gradients in one array, then the optimizer on each
    rank.
    """

    def __init__(self, comm: Communicator, nbytes: int, algorithm: str) -> None:
        self.model = make_model(nbytes)
        self._comm = comm
        self._algorithm = algorithm
        self._flat = torch.zeros(nbytes // 4)
        self._optimizer = sgd(self.model.parameters())

    def step(self) -> None:
        grads = [parameter.grad for parameter in self.model]
        parts = self._flat.split([len(grad) for grad in grads])
        for part, grad in zip(parts, grads, strict=True):
            part.copy_(grad)
        self._comm.all_reduce(self._flat, "avg", algorithm=self._algorithm)
        for part, grad in zip(parts, grads, strict=True):
            grad.copy_(part)
        self._optimizer.step()


def verify(comm: Communicator, nbytes: int, ps: ParameterServer, model: nn.ParameterList) -> None:
    """Raises `AssertionError` if the results of a few steps are not bit by bit those of sums in
    rank order.
    """
    reference = AllReduceTraining(comm, nbytes, "direct")
    for step in range(CHECKED_STEPS):
        for net in (model, reference.model):
            set_gradients(net, comm.rank, step)
        ps.step()
        reference.step()
    for mine, theirs in zip(model, reference.model, strict=True):
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32)), "other bits"


def link_s(comm: Communicator, nbytes: int) -> float:
    """Returns the seconds for a message of `nbytes` bytes from rank 0 to rank 1."""
    x = np.zeros(nbytes, np.uint8)

    def call() -> None:
        if comm.rank == 0:
            comm.send(x, 1)
        elif comm.rank == 1:
            comm.recv(x, 0)

    call()
    return time_s(comm, call, 2)


class RankSteps:
    """What this rank runs: a training step for each contestant in which this rank is a worker, and
    a thread for each contestant in which this rank is only a server.

    The workers first verify each step with a parameter server: the exact result, and the numbers of
    bytes sent and received.
    """

    def __init__(self, world: Communicator, nbytes: int, range_bytes: int | None) -> None:
        self.workers = world.group(range(WORKERS))
        self.steps: dict[Contestant, Step] = {}
        self._servers: list[ParameterServer] = []
        self._threads: list[threading.Thread] = []
        for contestant in CONTESTANTS:
            part = world.group(range(contestant.ranks))
            if part is None:
                continue
            if contestant.servers:
                self._add_servers(part, contestant, nbytes, range_bytes)
            else:
                ring = AllReduceTraining(part, nbytes, "ring")
                set_gradients(ring.model, part.rank, 0)
                self.steps[contestant] = ring.step

    def _add_servers(
        self, comm: Communicator, contestant: Contestant, nbytes: int, range_bytes: int | None
    ) -> None:
        model = make_model(nbytes)
        ps = ParameterServer(
            model,
            sgd,
            comm=comm,
            servers=contestant.servers,
            dedicated=contestant.dedicated,
            range_bytes=range_bytes,
        )
        self._servers.append(ps)
        if not ps.is_worker:
            self._threads.append(threading.Thread(target=ps.serve))
            self._threads[-1].start()
            return
        assert self.workers is not None
        verify(self.workers, nbytes, ps, model)
        counted, closed_form = ps.stats(), ps.plan.traffic(comm.rank)
        assert counted.sent_bytes == CHECKED_STEPS * closed_form.sent_bytes
        assert counted.received_bytes == CHECKED_STEPS * closed_form.received_bytes
        self.steps[contestant] = ps.step

    def close(self) -> None:
        """Ends the parameter servers. On a dedicated server's rank, waits for the workers."""
        for thread in self._threads:
            thread.join()
        for ps in reversed(self._servers):
            ps.close()


def measure(nbytes: int, rounds: int, range_bytes: int | None) -> list[Row]:
    """Measures all contestants. Runs on every rank; dedicated servers return no rows."""
    torch.set_num_threads(1)
    rank = int(os.environ["PARAMETER_SERVER_RANK"])
    place = os.environ["PARAMETER_SERVER_RENDEZVOUS"]
    with (
        unisono.init(rank=rank, size=RANKS, rendezvous=place, timeout_s=120) as world,
        closing(RankSteps(world, nbytes, range_bytes)) as contestants,
    ):
        if contestants.workers is None:
            return []
        return list(_rows(contestants.workers, contestants.steps, nbytes, rounds))


def _rows(
    comm: Communicator, steps: dict[Contestant, Step], nbytes: int, rounds: int
) -> Iterator[Row]:
    times: dict[Contestant, list[float]] = {contestant: [] for contestant in steps}
    links: list[float] = []
    for round_ in range(rounds):
        order = list(steps)
        shift = round_ % len(order)
        for contestant in order[shift:] + order[:shift]:
            times[contestant].append(time_s(comm, steps[contestant], 2))
        links.append(link_s(comm, nbytes))
    for contestant, found in times.items():
        busiest = contestant.busiest_bytes(nbytes)
        yield Row(
            name=str(contestant),
            nbytes=nbytes,
            busiest_bytes=busiest,
            bound_s=busiest / nbytes * median(links),
            times_s=tuple(found),
        )


# ---- the main program


def start_ranks(
    lab: Lab | None, arguments: Sequence[str], result: Path
) -> list[subprocess.Popen[Any]]:
    """Starts all ranks. In a lab (of network namespaces), each rank runs on its own lab host."""
    name = f"parameter-server-steps-{os.getpid()}"
    place = name if lab is None else f"tcp://{lab.address(0)}:{PORT}"
    words = [sys.executable, __file__, *arguments, "--result", str(result)]
    found = []
    for rank in range(RANKS):
        env = {
            **os.environ,
            "PARAMETER_SERVER_RANK": str(rank),
            "PARAMETER_SERVER_RENDEZVOUS": place,
            "UNISONO_JOB_SECRET": name,
        }
        if lab is None:
            found.append(subprocess.Popen(words, env=env))
        else:
            found.append(lab.start(rank, words, env))
    return found


def collect(lab: Lab | None, arguments: Sequence[str]) -> list[Row]:
    """Runs all ranks and returns the rows that rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        processes = start_ranks(lab, arguments, result)
        try:
            codes = [process.wait(600) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with codes {codes}: see their output")
        rows = json.loads(result.read_text())
    return [Row(**{**row, "times_s": tuple(row["times_s"])}) for row in rows]


def render(rows: Sequence[Row], title: str) -> Table:
    """Returns a table with medians and quartiles over the rounds."""
    table = Table(title=title)
    table.add_column("servers")
    for name in (
        "bytes",
        "busiest rank sends",
        "us a step",
        "bound us",
        "over the bound",
        "target",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        target = "" if row.name == "ring" else f"{BAR} {'yes' if row.ratio <= BAR else 'no'}"
        table.add_row(
            row.name,
            format_size(row.nbytes),
            f"{row.busiest_bytes / row.nbytes:.2f} B",
            microseconds(row.times_s),
            f"{row.bound_s * 1e6:.0f}",
            f"{row.ratio:.2f}",
            target,
        )
    return table


def main(
    *,
    size: Annotated[str, typer.Option(help="Bytes of the model.")] = "4M",
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each contestant.")] = 5,
    rate: Annotated[str, typer.Option(help="Rate of the links.")] = "50mbit",
    one_host: Annotated[bool, typer.Option(help="Shared memory instead of a lab.")] = False,
    range_size: Annotated[str, typer.Option("--range", help="Bytes of a range.")] = "",
    result: Annotated[Path | None, typer.Option(hidden=True)] = None,
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "parameter-server-steps.json",
) -> None:
    if result is not None:  # this process is one of the ranks
        (nbytes,) = parse_sizes(size)
        range_bytes = parse_sizes(range_size)[0] if range_size else None
        rows = measure(nbytes, rounds, range_bytes)
        if os.environ["PARAMETER_SERVER_RANK"] == "0":
            result.write_text(json.dumps([asdict(row) for row in rows]))
        return
    arguments = ["--size", size, "--rounds", str(rounds), "--range", range_size]
    if one_host:
        rows, title = collect(None, arguments), "one host"
        json_path = json_path.with_stem(json_path.stem + "-one-host")
    else:
        with Lab(hosts=RANKS, rate=rate, shaping=EVEN) as lab:
            rows, title = collect(lab, arguments), f"{RANKS} hosts, links of {rate}"
    Console(width=130).print(render(rows, f"{WORKERS} workers, {title}"))
    write(json_path, rows, [])


if __name__ == "__main__":
    typer.run(main)
