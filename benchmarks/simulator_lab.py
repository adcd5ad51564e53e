"""Compares the simulator with lab hosts (requires root, 15 minutes): `python
benchmarks/simulator_lab.py`.

All_reduce runs with several algorithms on 2 to 8 hosts, and on 4 hosts of which the last has a
slower link. Rates are low, so that two cores suffice for 8 hosts. The simulator uses three inputs,
which are measured in the same run. iperf3 measures the rate of a link. A ring of 8 bytes gives the
minimum time of a message. Every call gives each rank's delay after the first rank's start. The
simulator runs the executor's plans with the executor's block sizes. A time is that of one call,
from a barrier to the return of the last rank, because successive calls would overlap.

With --json, the file keeps its rows that this run does not measure, so that host sets and sizes can
run separately. `--no-even` measures ports with one queue each and the machine's own congestion
control.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from unisono import algorithms, simulate, topology
from unisono.bench.cases import Case
from unisono.bench.cluster import Cluster
from unisono.bench.contestants import NETWORK
from unisono.bench.lab import EVEN, Lab, Shaping
from unisono.bench.results import RunReport
from unisono.bench.runner import Pace, run_benchmark
from unisono.bench.sizes import format_size, parse_sizes
from unisono.bootstrap.peer_exchange import shape_among
from unisono.commands.outputs import progress
from unisono.config import DEFAULT_STAGING_BYTES
from unisono.execution.native_executor import spanning_block_bytes
from unisono.simulator import Blocks, Conditions, Endpoint, Job
from unisono.topology import Topology

ALGORITHMS = ("ring", "halving_doubling", "direct", "reduce_broadcast")
"""reduce_broadcast is a binomial tree up and down."""
TINY = 8
ONE_CALL = 1e-4
"""Seconds of successive calls: less than any call except the smallest takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A number of lab hosts; `last` is the rate of the last host's link, as a fraction of the rate
    of the other links.
    """

    hosts: int
    last: float = 1.0

    def __str__(self) -> str:
        return f"{self.hosts}" if self.last == 1 else f"{self.hosts}, one at {self.last:.0%}"

    def lab(self, mbit: int, shaping: Shaping) -> Lab:
        """Returns the hosts as a lab of network namespaces."""
        slow = {} if self.last == 1 else {self.hosts - 1: f"{mbit * self.last:.0f}mbit"}
        return Lab(hosts=self.hosts, rate=f"{mbit}mbit", rates=slow, shaping=shaping)

    def network(self, payload_Bps: float, message_s: float) -> Topology:
        """Returns the hosts as a network to simulate. A message passes two links, so the latency of
        each link is half of a message's minimum time. This time is a latency because a stream of
        messages does not wait for it.
        """
        star = topology.star(self.hosts)
        ends = np.minimum(star.links.src, star.links.dst)
        rate = np.where(ends == self.hosts - 1, self.last, 1.0) * payload_Bps
        return star.with_links(bandwidth_Bps=rate, latency_s=message_s / 2)


PLACES = (Place(hosts=2), Place(hosts=4), Place(hosts=8), Place(hosts=4, last=0.4))


def measure(
    place: Place, sizes: tuple[int, ...], mbit: int, rounds: int, shaping: Shaping
) -> RunReport:
    """Measures all algorithms at all sizes. At each size, the algorithms alternate."""
    names = [f"unisono:{name}" for name in ALGORITHMS]
    cases = [Case(op="all_reduce", ranks=place.hosts, nbytes=size) for size in (TINY, *sizes)]
    with place.lab(mbit, shaping) as lab, progress() as observe:
        return run_benchmark(
            cases,
            (*names, NETWORK),
            ours=names[0],
            pace=Pace(rounds=rounds, round_s=ONE_CALL, min_iterations=1),
            cluster=Cluster(lab=lab),
            observe=observe,
        )


def even_ports(mbit: int) -> Shaping:
    """Returns a shaping whose token buckets hold the bytes that a port sends in 2.6 ms, so that the
    port loses no time while the processor is busy. A packet has at most a quarter of a bucket's
    bytes.
    """
    tokens = mbit * 328
    return replace(EVEN, burst=str(tokens), segment_bytes=min(EVEN.segment_bytes, tokens // 4))


def predict_s(
    name: str, network: Topology, nbytes: int, late_s: Sequence[Sequence[float]]
) -> list[float]:
    """Returns the simulated seconds of an algorithm for each round. The simulation sends each of
    the executor's blocks separately, and starts the ranks with the delays that were measured.
    """
    schedule = algorithms.build("all_reduce", name, ranks=network.num_ranks)
    shape = shape_among(network.num_ranks, 1, 1, DEFAULT_STAGING_BYTES)
    block_bytes = spanning_block_bytes(schedule, nbytes, shape)
    blocks = Blocks(block_bytes=block_bytes, lead=shape.depth - 2, depth=shape.depth)
    job = Job(schedule=schedule, nbytes=nbytes, blocks=blocks)
    found = []
    for by in late_s:
        late = {rank: Endpoint(enters_s=seconds) for rank, seconds in enumerate(by)}
        found.append(simulate([job], network, conditions=Conditions(endpoints=late)).time_s)
    return found


def compare(place: Place, report: RunReport, mbit: int) -> list[dict[str, Any]]:
    """Returns measured and simulated times."""
    ring = report.rows[0].of("unisono:ring")
    assert ring is not None and ring.median_s, "the ring was measured"
    message_s = ring.median_s / algorithms.cost("all_reduce", "ring", ranks=place.hosts).rounds
    payloads = [row.payload_Bps for row in report.rows if row.payload_Bps]
    network_of = {"payload_Bps": median(payloads), "message_s": message_s}
    network = place.network(**network_of)
    found = []
    for row in report.rows[1:]:
        for name in ALGORITHMS:
            measurement = row.of(f"unisono:{name}")
            if measurement is None or not measurement.median_s:
                continue
            late_s = measurement.late_s
            each_s = predict_s(name, network, row.case.nbytes, late_s)
            in_step_s = predict_s(name, network, row.case.nbytes, [()])[0]
            predicted_s = median(each_s)
            found.append(
                {
                    "hosts": str(place),
                    "algorithm": name,
                    "nbytes": row.case.nbytes,
                    "measured_s": measurement.median_s,
                    "simulated_s": predicted_s,
                    "simulated_in_step_s": in_step_s,
                    "late_s": median(max(by) for by in late_s),
                    "error": predicted_s / measurement.median_s - 1,
                    "mbit": mbit,
                    **network_of,
                    "busy_cores": report.machine["busy_cores"],
                }
            )
    return found


def table(rows: list[dict[str, Any]]) -> Table:
    """Returns a table with a row for each host set and algorithm, and a column for each size."""
    sizes = sorted({row["nbytes"] for row in rows})
    made = Table(title="all_reduce: measured ms (error of the simulation)", title_justify="left")
    for column in ("hosts", "algorithm", *map(format_size, sizes)):
        made.add_column(column, justify="left" if column == "algorithm" else "right")
    for hosts, name in dict.fromkeys((row["hosts"], row["algorithm"]) for row in rows):
        of = {r["nbytes"]: r for r in rows if (r["hosts"], r["algorithm"]) == (hosts, name)}
        cells = [
            f"{of[n]['measured_s'] * 1e3:.1f} ({of[n]['error']:+.1%})" if n in of else ""
            for n in sizes
        ]
        made.add_row(hosts, name, *cells)
    errors = [abs(row["error"]) for row in rows]
    made.caption = f"median error {median(errors):.1%}, worst {max(errors):.1%}"
    return made


def main(
    *,
    sizes: Annotated[str, typer.Option(help="Sizes of the vector.")] = "1M,4M,16M",
    mbit: Annotated[int, typer.Option(help="Rate of the links, in Mbit/s.")] = 50,
    rounds: Annotated[int, typer.Option(help="Rounds of every algorithm.")] = 5,
    even: Annotated[bool, typer.Option(help="Use ports that hosts share evenly.")] = True,
    places: Annotated[str, typer.Option(help="Host sets by number, from 0.")] = "0,1,2,3",
    json_path: Annotated[
        Path | None, typer.Option("--json", help=("Write the rows to this file."))
    ] = None,
) -> None:
    rows: list[dict[str, Any]] = []
    shaping = even_ports(mbit) if even else Shaping()
    for place in (PLACES[int(number)] for number in places.split(",")):
        rows += compare(place, measure(place, parse_sizes(sizes), mbit, rounds, shaping), mbit)
        if json_path is not None:
            rows = merged(json_path, rows)
            json_path.write_text(json.dumps(rows, indent=2) + "\n")
    Console(width=120).print(table(rows))


def merged(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the measured rows, and those rows of the file whose host set, algorithm and size were
    not measured again.
    """

    def key(row: dict[str, Any]) -> tuple[int, str, int]:
        places = [str(place) for place in PLACES]
        return places.index(row["hosts"]), row["algorithm"], row["nbytes"]

    before = json.loads(path.read_text()) if path.exists() else []
    found = {key(row): row for row in (*before, *rows)}
    return [
        found[at] for at in sorted(found, key=lambda at: (at[0], ALGORITHMS.index(at[1]), at[2]))
    ]


if __name__ == "__main__":
    typer.run(main)
