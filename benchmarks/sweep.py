"""Runs the measurements for the performance targets on one host, and writes benchmarks/RESULTS.md.

Every part (interface, rank count, operation) is one JSON file in the results folder. Parts with a
file are not measured again, so an interrupted sweep resumes.

    python benchmarks/sweep.py                       # all parts, then the page
    python benchmarks/sweep.py --ranks 2 --api torch # some parts
    python benchmarks/sweep.py --peers impi          # beside Intel MPI, which is then installed
    python benchmarks/write_pages.py                        # the page from what is there
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from intel_mpi import install_intel_mpi, intel_mpi_version
from pages.peers import PEERS_PREFIX, render_peers
from rich.console import Console
from write_pages import write_pages

from unisono.bench.cases import Case
from unisono.bench.contestants import INTEL, INTEL_ROOT, MEMORY, OURS
from unisono.bench.runner import Pace, run_benchmark
from unisono.bench.sizes import parse_sizes
from unisono.native import usable_cores

HERE = Path(__file__).parent
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
AGAINST = {"native": ("openmpi", "mpich"), "torch": ("gloo",)}
SIZES = "8,1K,16K,128K,1M,8M,64M"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    api: str
    ranks: int
    op: str
    peers: tuple[str, ...] = ()
    """Libraries to compare with that were named; by default those of the interface."""

    @property
    def against(self) -> tuple[str, ...]:
        """Returns the libraries to compare with. With more ranks than cores MPICH is excluded,
        since it never yields its core and takes seconds per call.
        """
        crowded, peers = self.ranks > usable_cores(), self.peers or AGAINST[self.api]
        return tuple(peer for peer in peers if not (crowded and peer == "mpich"))

    @property
    def file_name(self) -> str:
        prefix = PEERS_PREFIX if self.peers else f"{self.api}-"
        return f"{prefix}n{self.ranks}-{self.op}.json"

    def is_measured(self, folder: Path) -> bool:
        """Returns true if the folder has a file of this part, with the same contestants."""
        path = folder / self.file_name
        if not path.exists():
            return False
        known = set(json.loads(path.read_text())["geometric_mean"])
        return not self.peers or known == {OURS[self.api], *self.against, MEMORY}

    def measure(self, sizes: str, pace: Pace, *, bind: bool) -> dict[str, object]:
        cases = [Case(op=self.op, ranks=self.ranks, nbytes=n) for n in parse_sizes(sizes)]
        ours = OURS[self.api]
        contestants = (ours, *self.against, MEMORY)
        command = ("unisono", "bench", self.op, "-n", str(self.ranks), "--sizes", sizes)
        command += ("--api", self.api, "--against", ",".join(self.against))
        command += ("--bind",) if bind else ()
        report = run_benchmark(cases, contestants, ours=ours, pace=pace, bind=bind, command=command)
        document = report.to_dict()
        if INTEL in self.against:
            document["machine"]["packages"][INTEL] = intel_mpi_version()
        return document


def main(
    *,
    ranks: Annotated[str, typer.Option(help="Rank counts, separated by commas.")] = "2,4,8",
    api: Annotated[str, typer.Option(help="Interfaces: native, torch.")] = "native,torch",
    peers: Annotated[
        str,
        typer.Option(
            help="Libraries to compare the communicator with, such as impi,openmpi,mpich. The "
            "results are a section of their own, which is also printed."
        ),
    ] = "",
    sizes: Annotated[str, typer.Option(help="Message sizes, as for unisono bench.")] = SIZES,
    rounds: Annotated[
        int, typer.Option(help=("Measurement rounds; in each, every contestant runs once."))
    ] = 7,
    row_budget: Annotated[float, typer.Option(help="Approximate seconds of a row.")] = 6.0,
    bind: Annotated[bool, typer.Option("--bind", help="Keep rank r on core r mod cores.")] = False,
    folder: Annotated[Path, typer.Option(help="Folder of the parts.")] = HERE / "results",
    page: Annotated[Path, typer.Option(help="Page to write.")] = HERE / "RESULTS.md",
) -> None:
    console = Console(stderr=True)
    folder.mkdir(parents=True, exist_ok=True)
    named = tuple(filter(None, peers.split(",")))
    if INTEL in named and INTEL_ROOT not in os.environ:
        os.environ[INTEL_ROOT] = str(install_intel_mpi())
    parts = [
        Part(api=interface, ranks=int(count), op=op, peers=named)
        for interface in (["native"] if named else api.split(","))
        for count in ranks.split(",")
        for op in OPS
    ]
    pace = Pace(rounds=rounds, row_budget_s=row_budget)
    for index, part in enumerate(parts, start=1):
        path = folder / part.file_name
        if part.is_measured(folder):
            continue
        console.print(f"[{index}/{len(parts)}] {part.file_name}")
        document = part.measure(sizes, pace, bind=bind)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n")
        partial.rename(path)
        if part_skipped := document["skipped"]:
            console.print(f"  skipped: {part_skipped}")
    if named:
        measured = [json.loads((folder / part.file_name).read_text()) for part in parts]
        print("\n".join(render_peers(measured)))
    for path in write_pages(folder, page):
        console.print(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
