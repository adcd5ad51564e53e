"""Runs `unisono check`, which compares every operation with NumPy and lists facts that explain
failures."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

import unisono
from unisono.bench.cases import OPERATIONS, STORAGE, Case, reductions_of
from unisono.bench.contestant_rank import connect_peer
from unisono.bench.contestants import OURS, Contestant
from unisono.bench.expected_results import allocate, count_wrong
from unisono.bench.peers.base import Array, Call
from unisono.bench.peers.unisono_communicator import bind
from unisono.bench.selfcheck_facts import Fact, gather_facts, read_neighbour
from unisono.communicator import Communicator
from unisono.errors import UnsupportedError
from unisono.temporary_folders import TemporaryFolder

SIZES = (0, 8, 1000, 65_536, 3_000_000)
"""Sizes of checked messages in bytes: empty, less than one element per rank, uneven, one block,
many blocks."""

_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Result of the check of one operation: the number of cases, and the failures."""

    op: str
    cases: int
    dtypes: tuple[str, ...]
    failures: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    ranks: int
    facts: tuple[Fact, ...]
    verdicts: tuple[CheckResult, ...]
    error: str | None = None

    @property
    def passed(self) -> bool:
        return self.error is None and not any(verdict.failures for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def check_cases(op: str, ranks: int) -> Iterator[Case]:
    """Yields the cases of one operation, with all types and reductions, a few sizes and two
    roots."""
    operation = OPERATIONS[op]
    if op == "barrier":
        yield Case(op=op, ranks=ranks, nbytes=0)
        return
    if operation.paired and ranks % 2:
        return
    roots = (0, ranks - 1) if operation.rooted and ranks > 1 else (0,)
    for dtype in STORAGE:
        for redop in reductions_of(dtype, op) if operation.reduces else ("sum",):
            # Only some cases have all sizes, so that the check takes seconds instead of minutes.
            many = redop in ("sum", "max") and dtype == "float32" and op != "stream"
            sizes = SIZES if many else SIZES[2:4]
            for nbytes in sizes:
                for root in roots:
                    yield Case(
                        op=op, ranks=ranks, nbytes=nbytes, dtype=dtype, redop=redop, root=root
                    )


def require_device(device: str) -> None:
    """Raises `UnsupportedError` if this machine lacks a device, which is "" or "cuda"."""
    if device == "cuda":
        importlib.import_module("unisono.bench.peers.cuda_devices").require_gpu()


def run_checks(ranks: int, device: str = "", ops: Sequence[str] = tuple(OPERATIONS)) -> Checks:
    """Checks operations on `ranks` new processes. `device`: that of the tensors of the torch
    backend, see `Contestant`; by default the communicator is checked, on arrays."""
    try:
        answers: list[_RankAnswer] = unisono.run(
            _check_rank, ranks=ranks, args=(ranks, device, tuple(ops))
        )
    except Exception as error:
        # An error of the ranks is part of the result, so that the facts are still listed.
        return Checks(ranks=ranks, facts=gather_facts(None), verdicts=(), error=str(error))
    verdicts = tuple(_merge(parts) for parts in zip(*(a.verdicts for a in answers), strict=True))
    readable = all(answer.reads_neighbour for answer in answers)
    return Checks(ranks=ranks, facts=gather_facts(readable), verdicts=verdicts)


def render_checks(checks: Checks) -> RenderableType:
    environment = Table(title="environment", title_justify="left", show_header=False)
    for fact in checks.facts:
        mark = {True: "[green]ok[/]", False: "[yellow]no[/]", None: ""}[fact.good]
        environment.add_row(mark, fact.name, fact.value)
    table = Table(title=f"operations between {checks.ranks} ranks", title_justify="left")
    table.add_column("")
    table.add_column("operation")
    table.add_column("cases", justify="right")
    table.add_column("types")
    for verdict in checks.verdicts:
        mark = "[red]FAIL[/]" if verdict.failures else "[green]ok[/]"
        notes = verdict.failures[:3] or (f"{len(verdict.dtypes)}", *verdict.skipped)
        table.add_row(mark, verdict.op, str(verdict.cases), "; ".join(notes))
    if checks.error is not None:
        return Group(environment, f"[red]FAIL[/] the ranks did not run: {checks.error}")
    end = "[green]This machine works.[/]" if checks.passed else "[red]Some results are wrong.[/]"
    return Group(environment, table, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankAnswer:
    verdicts: tuple[CheckResult, ...]
    reads_neighbour: bool


def _check_rank(ranks: int, device: str, ops: tuple[str, ...]) -> _RankAnswer:
    with unisono.init(timeout_s=_TIMEOUT_S) as comm:
        if device:
            verdicts = _check_device(comm, ranks, device, ops)
        else:
            verdicts = tuple(_check_operation(comm, op, ranks) for op in ops)
        return _RankAnswer(verdicts=verdicts, reads_neighbour=read_neighbour(comm))


def _check_device(
    comm: Communicator, ranks: int, device: str, ops: tuple[str, ...]
) -> tuple[CheckResult, ...]:
    """Checks the operations of the torch backend."""
    with TemporaryFolder("unisono-check-") as folder:
        # All ranks use rank 0's file, whose path all ranks must know.
        path = np.zeros(4096, np.uint8)
        own = np.frombuffer(str(folder).encode(), np.uint8)
        path[: own.size] = own
        shared = comm.broadcast(path, 0).tobytes().rstrip(b"\0").decode()
        peer = connect_peer(
            Contestant(name=OURS["torch"], device=device),
            rank=comm.rank,
            ranks=ranks,
            rendezvous=f"file://{shared}/store",
        )

        def bind_on_device(comm: Communicator, case: Case, x: Array, out: Array) -> Call:
            return partial(peer.with_arrays, partial(peer.repeat(case, x, out), 1))

        found = tuple(_check_operation(comm, op, ranks, bind_on_device) for op in ops)
        peer.close()
        comm.barrier()  # the file must exist until all ranks have left
        return found


def _check_operation(
    comm: Communicator,
    op: str,
    ranks: int,
    bind_case: Callable[[Communicator, Case, Array, Array], Call] | None = None,
) -> CheckResult:
    failures: list[str] = []
    skipped: list[str] = []
    dtypes: list[str] = []
    for case in check_cases(op, ranks):
        try:
            x, out = allocate(case, comm.rank)
            wrong = count_wrong(case, comm.rank, x, out, (bind_case or bind)(comm, case, x, out))
        except UnsupportedError as error:
            skipped.append(f"{case.dtype}: {error}")
            continue
        dtypes.append(case.dtype)
        if wrong:
            name = f"{case.dtype} {case.redop} {case.nbytes} B root {case.root}"
            failures.append(f"{name}: {wrong} wrong elements on rank {comm.rank}")
    return CheckResult(
        op=op,
        cases=len(dtypes),
        dtypes=tuple(dict.fromkeys(dtypes)),
        failures=tuple(failures),
        skipped=tuple(dict.fromkeys(skipped)),
    )


def _merge(parts: tuple[CheckResult, ...]) -> CheckResult:
    """Merges the results of all ranks for one operation into one result."""
    first = parts[0]
    failures = tuple(failure for part in parts for failure in part.failures)
    return CheckResult(
        op=first.op,
        cases=first.cases,
        dtypes=first.dtypes,
        failures=failures,
        skipped=first.skipped,
    )
