"""The command `unisono calibrate`: options only, fast to import."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.commands.outputs import JsonOption, result_console, writable, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from unisono.simulator import Holdout, LinkModel, Sample


def calibrate(
    *,
    files: Annotated[
        list[Path],
        typer.Argument(help="Of `unisono bench --json` or `tune`, or what nccl-tests printed."),
    ],
    op: Annotated[str | None, typer.Option(help="Only this operation.")] = None,
    contestant: Annotated[
        str | None, typer.Option(help="Whose times; by default the first's.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="What ran: by default what the file says, else direct, for NCCL ring."),
    ] = None,
    out_path: Annotated[
        Path | None,
        typer.Option("--out", callback=writable, metavar="FILE", help="Write the models here."),
    ] = None,
    json_path: JsonOption = None,
) -> None:
    """Make link models of measurements: what a message takes, by its size.

    A model is a few lines, each for a range of sizes: alpha seconds, and 1 / rate for each byte.
    Several files of the same operation and ranks are runs, which make one model.
    Held out: how well every other size, alone, foretells the rest (the worse half). The file is for
    `unisono simulate --model` and `unisono bench --predict`.
    """
    from itertools import groupby

    from unisono.errors import UnisonoError
    from unisono.simulator import calibrate, to_json, worse_holdout

    def kind(found: tuple[str, Sample]) -> tuple[str, int, str]:
        _, sample = found
        return sample.op, sample.ranks, sample.contestant

    models: list[LinkModel] = []
    held: list[Holdout | None] = []
    try:
        samples = [
            (path.name, sample) for path in files for sample in _samples(path, op, contestant)
        ]
        for _, some in groupby(sorted(samples, key=kind), key=kind):
            names, runs = zip(*some, strict=True)
            source = ", ".join(dict.fromkeys(names))
            models += calibrate(runs, algorithm=algorithm, source=source)
            held.append(worse_holdout(runs, algorithm=algorithm))
        text = to_json(models)
        if out_path is not None:
            out_path.write_text(text, encoding="utf-8")
    except (ValueError, OSError, UnisonoError) as error:
        raise typer.BadParameter(str(error)) from error
    console = result_console(json_path)
    console.print(_table(models, held))
    if out_path is not None:
        console.print(f"written: {out_path}", style="dim", highlight=False, soft_wrap=True)
    write_json(_document(models, held), json_path)


def _samples(path: Path, op: str | None, contestant: str | None) -> list[Sample]:
    """What a file says was measured. Raises ValueError."""
    from unisono.simulator import of_contestant, read
    from unisono.text_files import reading

    with reading(path) as text:
        return list(of_contestant(read(text, op=op), contestant))


def _table(models: list[LinkModel], held: list[Holdout | None]) -> Table:
    from rich.table import Table

    from unisono.show import bytes_text, rate_text, time_text

    table = Table(title="what a message takes", title_justify="left")
    for name in ("operation", "ranks", "as", "from", "alpha", "rate", "error", "held out"):
        table.add_column(name, justify="left" if name in ("operation", "as") else "right")
    for model, left in zip(models, held, strict=True):
        for number, regime in enumerate(model.regimes):
            head = (model.op, str(model.ranks), model.algorithm) if number == 0 else ("",) * 3
            told = f"{left.mean:.1%} (worst {left.worst:.0%})" if left is not None else "-"
            alpha = abs(regime.alpha_s)
            table.add_row(
                *head,
                bytes_text(regime.least),
                ("-" if regime.alpha_s < 0 else "") + (time_text(alpha) if alpha else "0"),
                rate_text(1 / regime.byte_s) if regime.byte_s else "any",
                f"{model.error:.1%}" if number == 0 else "",
                told if number == 0 else "",
                end_section=number == len(model.regimes) - 1,
            )
    table.caption = (
        "from: bytes of a message. error: median of the fit. held out: mean error at every other "
        "size, of a model of the rest, from the half that foretells worse."
    )
    return table


def _document(models: list[LinkModel], held: list[Holdout | None]) -> dict[str, object]:
    from dataclasses import asdict

    return {
        "models": [
            {**asdict(model), "held_out": asdict(left) if left is not None else None}
            for model, left in zip(models, held, strict=True)
        ]
    }
