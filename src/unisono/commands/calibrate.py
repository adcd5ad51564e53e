"""The command `unisono calibrate` and its options. This module is fast to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.commands.outputs import JsonOption, print_written, result_console, writable, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from unisono.simulator import Holdout, LinkModel, Sample


FilesArgument = Annotated[
    list[Path],
    typer.Argument(
        help=("Files of `unisono bench --json` or `unisono tune`, or output of nccl-tests.")
    ),
]
ContestantOption = Annotated[
    str | None, typer.Option(help="Contestant whose times are used; by default the first.")
]
AlgorithmOption = Annotated[
    str | None,
    typer.Option(
        help="Algorithm that ran; by default as in the file, else ring for NCCL, direct for others."
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", callback=writable, metavar="FILE", help=("Write the models to this file.")
    ),
]


def calibrate(
    *,
    files: FilesArgument,
    op: Annotated[str | None, typer.Option(help="Use only this operation.")] = None,
    contestant: ContestantOption = None,
    algorithm: AlgorithmOption = None,
    out_path: OutOption = None,
    json_path: JsonOption = None,
) -> None:
    """Fit link models to measurements: the time of a message by its size.

    A model is a few lines, one per range of sizes: alpha seconds, and 1 / rate for each byte.
    Several files of the same operation and ranks are runs, which give one model. "Held out" is the
    error when fitted on alternate sizes; the worse of the two splits. The file is for `unisono
    simulate --model` and `unisono bench --predict`.
    """
    from unisono.errors import UnisonoError
    from unisono.simulator import to_json

    try:
        samples = [
            (path.name, sample) for path in files for sample in _samples(path, op, contestant)
        ]
        models, holdouts = _fit(samples, algorithm)
        text = to_json(models)
        if out_path is not None:
            out_path.write_text(text, encoding="utf-8")
    except (ValueError, OSError, UnisonoError) as error:
        raise typer.BadParameter(str(error)) from error
    console = result_console(json_path)
    console.print(_table(models, holdouts))
    print_written(console, [] if out_path is None else [out_path])
    write_json(_document(models, holdouts), json_path)


def _fit(
    samples: list[tuple[str, Sample]], algorithm: str | None
) -> tuple[list[LinkModel], list[Holdout | None]]:
    """Fits a model for each operation, number of ranks and contestant. Returns the models and their
    held-out errors."""
    from itertools import groupby

    from unisono.simulator import calibrate as fit
    from unisono.simulator import worse_holdout

    def kind(found: tuple[str, Sample]) -> tuple[str, int, str]:
        _, sample = found
        return sample.op, sample.ranks, sample.contestant

    models: list[LinkModel] = []
    holdouts: list[Holdout | None] = []
    for _, group in groupby(sorted(samples, key=kind), key=kind):
        names, runs = zip(*group, strict=True)
        source = ", ".join(dict.fromkeys(names))
        models += fit(runs, algorithm=algorithm, source=source)
        holdouts.append(worse_holdout(runs, algorithm=algorithm))
    return models, holdouts


def _samples(path: Path, op: str | None, contestant: str | None) -> list[Sample]:
    """Reads one contestant's samples from a file. Raises ValueError."""
    from unisono.simulator import of_contestant, read
    from unisono.text_files import reading

    with reading(path) as text:
        return list(of_contestant(read(text, op=op), contestant))


def _table(models: list[LinkModel], holdouts: list[Holdout | None]) -> Table:
    from rich.table import Table

    from unisono.show import bytes_text, rate_text, time_text

    table = Table(title="time of a message", title_justify="left")
    for name in ("operation", "ranks", "as", "from", "alpha", "rate", "error", "held out"):
        table.add_column(name, justify="left" if name in ("operation", "as") else "right")
    for model, holdout in zip(models, holdouts, strict=True):
        for number, regime in enumerate(model.regimes):
            head = (model.op, str(model.ranks), model.algorithm) if number == 0 else ("",) * 3
            error = (
                f"{holdout.mean:.1%} (worst {holdout.worst:.0%})" if holdout is not None else "-"
            )
            alpha = abs(regime.alpha_s)
            table.add_row(
                *head,
                bytes_text(regime.least),
                ("-" if regime.alpha_s < 0 else "") + (time_text(alpha) if alpha else "0"),
                rate_text(1 / regime.byte_s) if regime.byte_s else "any",
                f"{model.error:.1%}" if number == 0 else "",
                error if number == 0 else "",
                end_section=number == len(model.regimes) - 1,
            )
    table.caption = (
        "from: smallest message size. error: median of the fit. held out: mean error "
        "when fitted on alternate sizes; the worse of the two splits."
    )
    return table


def _document(models: list[LinkModel], holdouts: list[Holdout | None]) -> dict[str, object]:
    from dataclasses import asdict

    return {
        "models": [
            {**asdict(model), "held_out": asdict(holdout) if holdout is not None else None}
            for model, holdout in zip(models, holdouts, strict=True)
        ]
    }
