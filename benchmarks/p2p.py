"""Measures point-to-point messages and compares them with targets (requires root, half an hour).
Writes one JSON file per part.

Parts measure messages between pairs of ranks on one host and between two lab hosts, natively and
with torch. Other parts measure memory of unexpected messages, and steps of a pipeline. Parts with a
file in the results folder are not measured again. `python benchmarks/write_pages.py` writes the
page.

    python benchmarks/p2p.py                    # all parts
    python benchmarks/p2p.py --only n2,memory   # some
    python benchmarks/p2p.py --quick            # few sizes and rounds, 5 minutes; not kept
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import p2p_calls
import p2p_memory
import p2p_pipeline
import typer
from pages.messages import render_p2p
from rich.console import Console

from unisono.bench.cases import Case
from unisono.bench.contestants import MEMORY, NETWORK, OURS
from unisono.bench.runner import Pace, run_benchmark
from unisono.bench.sizes import parse_sizes
from unisono.commands.bench_run import Hosts
from unisono.commands.outputs import progress

HERE = Path(__file__).parent
OPS = ("ping_pong", "stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Sizes, rounds and times of the measurements."""

    quick: bool
    pace: Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Messages between pairs of ranks, with our library and with other libraries."""

    sizes: str
    quick_sizes: str
    against: tuple[str, ...]
    ranks: int = 2
    api: str = "native"
    hosts: Hosts | None = None
    budget_factor: float = 1.0
    """Factor by which rows of this part may take longer than other parts' rows."""

    def measure(self, scope: Scope) -> dict[str, Any]:
        sizes = self.quick_sizes if scope.quick else self.sizes
        cases = [
            Case(op=op, ranks=self.ranks, nbytes=nbytes)
            for op in OPS
            for nbytes in parse_sizes(sizes)
        ]
        ours = OURS[self.api]
        pace = replace(scope.pace, row_budget_s=self.budget_factor * scope.pace.row_budget_s)
        limit = MEMORY if self.hosts is None else NETWORK
        place = nullcontext() if self.hosts is None else self.hosts.build()
        with place as cluster, progress() as observe:
            report = run_benchmark(
                cases,
                (ours, *self.against, limit),
                ours=ours,
                pace=pace,
                cluster=cluster,
                command=self._command(sizes),
                observe=observe,
            )
        return report.to_dict()

    def _command(self, sizes: str) -> tuple[str, ...]:
        """Returns the `unisono bench` command that measures the same rows."""
        where: tuple[str, ...] = ("-n", str(self.ranks))
        if self.hosts is not None:
            where = ("--hosts", str(self.hosts.hosts), "--rate", self.hosts.rate or "")
        against = ("--api", self.api, "--against", ",".join(self.against))
        return ("unisono", "bench", ",".join(OPS), *where, "--sizes", sizes, *against)


def _memory(scope: Scope) -> dict[str, Any]:
    return p2p_memory.measure(p2p_memory.QUICK_LOADS if scope.quick else p2p_memory.LOADS)


def _calls(scope: Scope) -> dict[str, Any]:
    return p2p_calls.measure(rounds=50 * scope.pace.rounds)


def _pipeline(scope: Scope) -> dict[str, Any]:
    return p2p_pipeline.measure(rounds=scope.pace.rounds, round_s=0.2 if scope.quick else 1.0)


def _many_ranks(ranks: int) -> Pairs:
    """Returns a part in which all pairs of ranks send at the same time. MPICH is excluded, since it
    never yields its core and takes seconds per call.
    """
    sizes = "8,1K,16K,256K,1M,4M"
    return Pairs(ranks=ranks, sizes=sizes, quick_sizes="8,1M", against=("openmpi",))


PARTS: dict[str, Callable[[Scope], dict[str, Any]]] = {
    "n2": Pairs(
        sizes="8,128,1K,4K,16K,64K,256K,1M,4M,16M,64M",
        quick_sizes="8,4K,64K,1M,16M",
        against=("openmpi", "mpich"),
    ).measure,
    "n4": _many_ranks(4).measure,
    "n8": _many_ranks(8).measure,
    "torch": Pairs(
        api="torch", sizes="8,1K,16K,256K,1M,16M", quick_sizes="8,16M", against=("gloo",)
    ).measure,
    "hosts": Pairs(
        hosts=Hosts(hosts=2, rate="1gbit"),
        sizes="8,1M,4M,16M",
        quick_sizes="8,1M",
        against=("gloo", "openmpi"),
        budget_factor=8,  # the link is slow: one round of a stream takes a second
    ).measure,
    "calls": _calls,
    "memory": _memory,
    "pipeline": _pipeline,
}


def main(
    *,
    only: Annotated[str, typer.Option(help="Parts, separated by commas.")] = ",".join(PARTS),
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes and few rounds.")] = False,
    rounds: Annotated[
        int | None, typer.Option(help=("Measurement rounds; in each, every contestant runs once."))
    ] = None,
    row_budget: Annotated[float, typer.Option(help="Approximate seconds of a row.")] = 6.0,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder of the parts; by default benchmarks/results, unless --quick."),
    ] = None,
) -> None:
    console = Console(stderr=True)
    pace = Pace(rounds=rounds or (3 if quick else 7), row_budget_s=row_budget / (3 if quick else 1))
    scope = Scope(quick=quick, pace=pace)
    found = {}
    with _kept(folder, quick) as kept:
        for name in only.split(","):
            path = kept / f"p2p-{name}.json"
            if not path.exists():
                console.print(name)
                partial = path.with_suffix(".partial")
                partial.write_text(json.dumps(PARTS[name](scope), indent=1) + "\n")
                partial.rename(path)
            found[name] = json.loads(path.read_text())
    print("\n".join(render_p2p(found)))


@contextmanager
def _kept(folder: Path | None, quick: bool) -> Iterator[Path]:
    if folder is None and quick:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
        return
    kept = folder or HERE / "results"
    kept.mkdir(parents=True, exist_ok=True)
    yield kept


if __name__ == "__main__":
    typer.run(main)
