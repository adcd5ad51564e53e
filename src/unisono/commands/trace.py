"""The command `unisono trace`. This module is fast to import."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from unisono.commands.outputs import JsonOption, result_console, writable, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from unisono.timeline import JobSummary, RankDump

_DUMP_SUFFIX = ".dump"


class _ReadsByDefault(TyperGroup):
    """A command group in which `unisono trace PID` means `unisono trace read PID`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args.insert(0, "read")
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ReadsByDefault,
    help="Read the timelines of running or ended ranks: who computed, moved data, or waited.",
    no_args_is_help=True,
    epilog="Example: unisono trace --all -o trace.json; unisono trace summary --all --json -",
)

_Output = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        callback=writable,
        metavar="FILE",
        help="A trace (.json, .json.gz) for ui.perfetto.dev, or a .dump for `merge` and `summary`.",
    ),
]
_All = Annotated[
    bool, typer.Option("--all", help="All ranks of the jobs that run on this machine.")
]
_Torch = Annotated[
    list[Path] | None,
    typer.Option("--torch", metavar="FILE", help="A trace of torch.profiler to add; repeatable."),
]


@app.command(epilog="Example: unisono trace --all -o trace.json")
def read(
    *,
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="[PID|FILE]...", help="Processes, or kept files.")
    ] = None,
    every: _All = False,
    output: _Output = Path("trace.json"),
    torch_paths: _Torch = None,
) -> None:
    """Read the last events of running or ended processes of this machine.

    Each rank keeps its last 16,384 events (UNISONO_TIMELINE_EVENTS). A killed process keeps them
    too.
    """
    _write(_contents(sources or [], every), output, torch_paths or [])


@app.command(epilog="Example: unisono trace merge host0.dump host1.dump -o trace.json")
def merge(
    *,
    dumps: Annotated[list[Path], typer.Argument(metavar="DUMP...", help="Dumps of all hosts.")],
    output: _Output = Path("trace.json"),
    torch_paths: _Torch = None,
) -> None:
    """Merge dumps of several hosts into one trace, with all ranks on one clock."""
    _write(_contents([str(each) for each in dumps], False), output, torch_paths or [])


@app.command(epilog="Example: unisono trace summary rank.dump --json -")
def summary(
    *,
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="[PID|FILE]...", help="Processes, or dumps.")
    ] = None,
    every: _All = False,
    json_path: JsonOption = None,
) -> None:
    """Print how each rank spent the time of a training's steps, and which rank is slow.

    Communication during forward, backward or optimizer is hidden; the rest is exposed. The scale
    factor is the throughput, divided by the throughput of ranks that never wait.
    """
    from unisono.timeline import summarize_steps

    found = summarize_steps(_dumps(_contents(sources or [], every)))
    console = result_console(json_path)
    for job in found:
        console.print(_table(job))
        console.print(job.slowest_line(), highlight=False, soft_wrap=True)
        for line in _warnings(job):
            console.print(line, style="yellow", highlight=False, soft_wrap=True)
    write_json({"jobs": [_document(job) for job in found]}, json_path)


def _contents(sources: Sequence[str], every: bool) -> list[bytes]:
    """Returns the contents of the timelines of the given processes and files. With `every`, returns
    the timelines of all jobs instead."""
    from unisono.timeline import RankDump, files_of, files_of_jobs, load_contents

    if bool(sources) == every:
        raise typer.BadParameter("expected processes or files, or else --all")
    if every:
        jobs = files_of_jobs(lambda path: RankDump.parse(path.read_bytes()).job)
        return [each.path.read_bytes() for each in jobs]
    contents: list[bytes] = []
    for source in sources:
        if source.isdecimal():
            contents += [each.path.read_bytes() for each in files_of(int(source))]
            continue
        try:
            contents += load_contents(Path(source))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return contents


def _dumps(contents: Sequence[bytes]) -> list[RankDump]:
    from unisono.timeline import RankDump

    try:
        return [RankDump.parse(content) for content in contents]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _write(contents: Sequence[bytes], output: Path, torch_paths: Sequence[Path]) -> None:
    from unisono.timeline import TorchTrace, merge_dumps, missing_ranks, save_dumps

    dumps = _dumps(contents)
    console = result_console(None)
    if output.suffix == _DUMP_SUFFIX:
        if torch_paths:
            raise typer.BadParameter(
                f"--torch: {output} stores only the ranks' timelines; "
                "give --torch when you merge them into a trace"
            )
        save_dumps(output, contents)
    else:
        try:
            text = merge_dumps(dumps, [TorchTrace.load(path) for path in torch_paths])
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        packed = text.encode()
        output.write_bytes(gzip.compress(packed) if output.suffix == ".gz" else packed)
    ranks = ", ".join(str(each) for each in sorted({dump.rank for dump in dumps}))
    console.print(f"written: {output} (ranks {ranks})", highlight=False, soft_wrap=True)
    for missing in missing_ranks(dumps).values():
        lacking = ", ".join(map(str, missing))
        console.print(f"missing: ranks {lacking}", style="yellow", highlight=False)


def _table(job: JobSummary) -> Table:
    from rich.table import Table

    table = Table(title=f"median ms of {len(job.steps)} steps, {job.size} ranks")
    table.add_column("rank")
    for name in (
        "steps", "step", "compute", "communication", "hidden", "exposed", "overlap", "waits",
        "scale factor",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for steps, each in job.medians():
        times = (each.step_s, each.compute_s, each.communication_s, each.hidden_s, each.exposed_s)
        table.add_row(
            str(each.rank),
            str(steps),
            *(f"{1e3 * time_s:.2f}" for time_s in times),
            f"{each.overlap:.1%}",
            f"{1e3 * each.waited_s:.2f}",
            f"{each.scale_factor:.3f}",
        )
    return table


def _warnings(job: JobSummary) -> list[str]:
    found: list[str] = []
    if job.missing_ranks:
        found.append(f"missing: ranks {', '.join(map(str, job.missing_ranks))}")
    if not job.steps:
        found.append(
            "No whole step is in the timelines: a model needs data_parallel or "
            "DistributedOptimizer, and UNISONO_TIMELINE_EVENTS more than the events of a step."
        )
    return found


def _document(job: JobSummary) -> dict[str, Any]:
    return {
        "job": job.job,
        "size": job.size,
        "missing_ranks": list(job.missing_ranks),
        "lost_events": job.lost_events,
        "steps": [
            {
                "step": step.step,
                "slowest": step.slowest and step.slowest.text,
                "ranks": [
                    {
                        "rank": each.rank,
                        "step_s": each.step_s,
                        "compute_s": each.compute_s,
                        "communication_s": each.communication_s,
                        "hidden_s": each.hidden_s,
                        "exposed_s": each.exposed_s,
                        "overlap": each.overlap,
                        "waited_s": each.waited_s,
                        "scale_factor": each.scale_factor,
                        "phases_s": dict(each.phases_s),
                    }
                    for each in step.ranks
                ],
            }
            for step in job.steps
        ],
    }
