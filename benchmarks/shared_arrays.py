"""Measures arrays of `Communicator.empty` beside ordinary arrays, other libraries and the least
time of the memory, all in turn.

    python benchmarks/shared_arrays.py                      # 2 and 4 ranks
    python benchmarks/shared_arrays.py --peers openmpi,impi # with Intel MPI, which is installed
    python benchmarks/shared_arrays.py --quick              # 2 ranks, 3 sizes, only printed

The least time (`kernels`): all ranks at once read every byte that the operation must read, and
write every byte that it must write, in their own memory, with Unisono's copies and reductions. N is
the size. all_reduce, all_gather and all_to_all: every rank copies N. broadcast: every rank but the
root copies N. reduce_scatter: every rank sums n parts of N/n. Each is measured with ordinary stores
and with stores that bypass the caches; the faster one is the limit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from intel_mpi import install_intel_mpi, intel_mpi_version
from pages.shared_arrays import render_shared_arrays
from rich.console import Console

from unisono.bench.cases import Case
from unisono.bench.contestants import INTEL, INTEL_ROOT, KERNELS, OURS, SHARED, STREAMING
from unisono.bench.runner import Pace, run_benchmark
from unisono.bench.sizes import parse_sizes
from unisono.native import usable_cores

HERE = Path(__file__).parent
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
SIZES, QUICK_SIZES = "4K,32K,256K,1M,4M,16M,64M", "4K,256K,4M"


def measure(
    ranks: list[int], sizes: str, peers: list[str], pace: Pace, console: Console
) -> Iterator[dict[str, Any]]:
    """Yields a document for each number of ranks and each way to treat the input."""
    for count in ranks:
        # With more ranks than cores MPICH takes seconds per call, since it never yields its core.
        named = [peer for peer in peers if not (count > usable_cores() and peer == "mpich")]
        contestants = (SHARED, OURS["native"], *named, KERNELS, STREAMING)
        cases = [Case(op=op, ranks=count, nbytes=n) for op in OPS for n in parse_sizes(sizes)]
        for rewritten in (False, True):
            state = "written before each call" if rewritten else "unchanged"
            console.print(f"{count} ranks, input {state}")
            report = run_benchmark(
                cases,
                contestants,
                ours=SHARED,
                pace=pace,
                bind=True,  # else the limit's ranks, which never wait, may share a core
                rewritten=rewritten,
            )
            document = report.to_dict()
            if INTEL in named:
                document["machine"]["packages"][INTEL] = intel_mpi_version()
            yield document


def main(
    *,
    ranks: Annotated[str, typer.Option(help="Rank counts, separated by commas.")] = "2,4",
    sizes: Annotated[str, typer.Option(help="Message sizes, as for unisono bench.")] = SIZES,
    peers: Annotated[str, typer.Option(help="Libraries to compare with.")] = "openmpi",
    rounds: Annotated[int, typer.Option(help="Measurement rounds of each contestant.")] = 5,
    row_budget: Annotated[float, typer.Option(help="Approximate seconds of a row.")] = 1.0,
    quick: Annotated[bool, typer.Option("--quick", help="2 ranks, 3 sizes, only printed.")] = False,
    path: Annotated[Path, typer.Option(help="Results.")] = HERE / "results" / "shared-arrays.json",
) -> None:
    if quick:
        ranks, sizes = "2", QUICK_SIZES
    named = list(filter(None, peers.split(",")))
    if INTEL in named and INTEL_ROOT not in os.environ:
        os.environ[INTEL_ROOT] = str(install_intel_mpi())
    pace = Pace(rounds=rounds, row_budget_s=row_budget)
    counts = [int(count) for count in ranks.split(",")]
    runs = list(measure(counts, sizes, named, pace, Console(stderr=True)))
    print("\n".join(render_shared_arrays({"runs": runs})))
    if not quick:
        path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
