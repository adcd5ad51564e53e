"""The command `unisono tune` and its options. This module is fast to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.commands.outputs import (
    JsonOption,
    print_written,
    progress,
    result_console,
    writable,
    write_json,
)

if TYPE_CHECKING:
    from unisono.bench import Journal, TuneRequest
    from unisono.selection import Selection


RankCountsOption = Annotated[
    str, typer.Option("--ranks", "-n", help=("Numbers of ranks, separated by commas."))
]
OpsOption = Annotated[str, typer.Option(help="Operations, separated by commas; by default all.")]
SizesOption = Annotated[str, typer.Option(help=("Message sizes, as for unisono bench."))]
TimeBudgetOption = Annotated[
    float, typer.Option(min=1, help=("Approximate limit of the run, in seconds."))
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        callback=writable,
        metavar="FILE",
        help=("File to write; by default this machine's own file."),
    ),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")]


def tune(
    *,
    ranks: RankCountsOption = "2,4",
    ops: OpsOption = "",
    sizes: SizesOption = "8,1K:64M:x4",
    time_budget: TimeBudgetOption = 150.0,
    out: OutOption = None,
    resume: ResumeOption = False,
    json_path: JsonOption = None,
) -> None:
    """Measure which algorithms are fastest on this machine, and let all programs use them.

    Candidates alternate in one group of ranks. The result is a selection: a JSON file to read and
    edit. Programs find the default file by themselves, any other with UNISONO_SELECTION.
    FILE.journal keeps every measurement, for --resume.
    """
    from unisono.bench import Journal, describe_machine
    from unisono.selection import save

    try:
        request = _request(ranks, ops, sizes, time_budget)
        path, facts = _path(out), describe_machine()
        journal = Journal(path.with_name(path.name + ".journal"), facts, resume=resume)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    selection = _measure(request, journal)
    save(selection, path, facts)
    console = result_console(json_path)
    for rule in selection.rules:
        console.print(str(rule), highlight=False, soft_wrap=True)
    print_written(console, [path])
    write_json(_document(selection, path), json_path)


def _path(out: Path | None) -> Path:
    from unisono import config

    path = out or Path(config.tuned_path())
    if path == Path():
        raise ValueError("there is no home directory to write to; pass --out FILE")
    return path


def _measure(request: TuneRequest, journal: Journal) -> Selection:
    from unisono.bench import tune as run

    try:
        with progress() as observe:
            return run(request, journal, observe)
    except KeyboardInterrupt:
        typer.secho(f"interrupted; --resume continues from {journal.path}", err=True)
        raise typer.Exit(130) from None


def _document(selection: Selection, path: Path) -> dict[str, object]:
    fields = ("op", "ranks", "nbytes", "algorithm", "time_s")
    times = [{name: getattr(m, name) for name in fields} for m in selection.measured]
    return {"path": str(path), "rules": [str(rule) for rule in selection.rules], "measured": times}


def _request(ranks: str, ops: str, sizes: str, budget_s: float) -> TuneRequest:
    from unisono.bench import TUNABLE, TuneRequest, parse_sizes
    from unisono.commands.bench_run import split_names
    from unisono.types import Op

    words = split_names(ranks)
    if wrong := [word for word in words if not word.isdecimal()]:
        raise ValueError(f"ranks: expected a number of ranks, got {wrong[0]!r}")
    counts = tuple(int(word) for word in words)
    if unknown := [name for name in split_names(ops) if name not in list(Op)]:
        raise ValueError(f"unknown operation {unknown[0]!r}; known: {', '.join(TUNABLE)}")
    wanted = tuple(Op(name) for name in split_names(ops)) or TUNABLE
    return TuneRequest(ops=wanted, ranks=counts, sizes=parse_sizes(sizes), budget_s=budget_s)
