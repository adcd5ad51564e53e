"""Reads algorithm files, proves that they are correct, and compares their results with NumPy's
results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.markup import escape
from rich.table import Table

import unisono
from unisono import config
from unisono.bench.cases import Case
from unisono.bench.expected_results import allocate, count_wrong
from unisono.bench.peers.unisono_communicator import bind
from unisono.communicator import Communicator, join
from unisono.errors import UnisonoError, UnsupportedError
from unisono.schedule import Schedule, check, from_json, from_msccl_xml, from_mscclpp_json

_TIMEOUT_S = 60.0
_STAGING_BYTES = 256 << 20
_SIZES = (8, 1000, 65_536, 3_000_000)
_DTYPES = ("int64", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofResult:
    """Result for one file. `ran` is True if the algorithm's results were equal to NumPy's, False if
    not, and None if the algorithm was not run."""

    file: str
    op: str = ""
    ranks: int = 0
    parts: int = 0
    rounds: int = 0
    proved: bool = False
    reason: str = ""
    ran: bool | None = None

    @property
    def good(self) -> bool:
        """True if the algorithm is proved correct and no run had wrong results."""
        return self.proved and self.ran is not False


def read_schedule(text: str) -> Schedule:
    """Reads a schedule in the format of MSCCL, of MSCCL++, or of `schedule.to_json`. The contents
    determine the format.

    Raises `ScheduleError` or `UnsupportedError`.
    """
    if text.lstrip("\ufeff \t\r\n").startswith("<"):
        return from_msccl_xml(text)
    if '"gpus"' in text:
        return from_mscclpp_json(text)
    return from_json(text)


def judge(path: Path) -> ProofResult:
    """Reads one file and proves that its algorithm is correct. The result for a refused file has a
    reason."""
    try:
        schedule = read_schedule(path.read_text())
        check(schedule)
    except (UnisonoError, OSError, UnicodeDecodeError) as error:
        return ProofResult(file=str(path), reason=f"{type(error).__name__}: {error}")
    collective = schedule.collective
    return ProofResult(
        file=str(path),
        op=collective.op,
        ranks=collective.ranks,
        parts=collective.parts,
        rounds=schedule.num_rounds,
        proved=True,
    )


def run_proved(verdicts: Sequence[ProofResult], most_ranks: int) -> list[ProofResult]:
    """Runs proved algorithms of up to `most_ranks` ranks, with one process per rank, and compares
    their results with NumPy's results."""
    answers = dict.fromkeys((v.file for v in verdicts), "")
    ran = set()
    for ranks in sorted({v.ranks for v in verdicts if v.proved and v.ranks <= most_ranks}):
        files = [v.file for v in verdicts if v.proved and v.ranks == ranks]
        parts: list[list[str]] = unisono.run(_run_rank, ranks=ranks, args=(files,))
        for file, failures in zip(files, zip(*parts, strict=True), strict=True):
            ran.add(file)
            answers[file] = next((failure for failure in failures if failure), "")
    return [
        replace(v, ran=not answers[v.file], reason=answers[v.file]) if v.file in ran else v
        for v in verdicts
    ]


def _run_rank(files: Sequence[str]) -> list[str]:
    """Runs all files on this rank. Returns the error of each file, or an empty string."""
    settings = config.override(config.settings(), timeout_s=_TIMEOUT_S)
    # The staging buffers are large, because algorithms for GPUs may need hundreds of small pieces
    # in them. Only the pages that are used take memory.
    staging_bytes = max(settings.staging_bytes, _STAGING_BYTES)
    with join(config.launched_rank(), replace(settings, staging_bytes=staging_bytes)) as comm:
        return [_run_file(comm, file) for file in files]


def _run_file(comm: Communicator, file: str) -> str:
    schedule = read_schedule(Path(file).read_text())
    collective = schedule.collective
    for dtype in _DTYPES:
        for nbytes in _SIZES:
            case = Case(
                op=collective.op,
                ranks=collective.ranks,
                nbytes=nbytes,
                dtype=dtype,
                root=collective.root or 0,
            )
            x, out = allocate(case, comm.rank)
            call = bind(comm, case, x, out, algorithm=schedule)
            try:
                wrong = count_wrong(case, comm.rank, x, out, call)
            except UnsupportedError as error:  # raised on all ranks, so no rank waits for another
                return f"{dtype}, {nbytes} bytes: {error}"
            if wrong:
                return f"{dtype}, {nbytes} bytes: {wrong} wrong elements on rank {comm.rank}"
    return ""


def render_verdicts(verdicts: Sequence[ProofResult]) -> Table:
    """Returns a table with one row per file."""
    table = Table()
    for name in ("file", "operation", "ranks", "parts", "rounds", "proof", "run"):
        right = name in ("ranks", "parts", "rounds")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for v in verdicts:
        proof = "[green]proved[/]" if v.proved else f"[red]refused[/] {escape(v.reason)}"
        numbers = [str(n) if v.proved else "" for n in (v.ranks, v.parts, v.rounds)]
        ran = {None: "", True: "[green]equals NumPy[/]", False: f"[red]{escape(v.reason)}[/]"}
        table.add_row(escape(Path(v.file).name), v.op, *numbers, proof, ran[v.ran])
    return table
