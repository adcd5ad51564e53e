"""The command `unisono plan`; fast to import."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.commands.outputs import JsonOption, print_written, result_console, writable, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from unisono.planner import (
        Cluster,
        ErrorRow,
        Layout,
        MemoryComparison,
        Prediction,
        SearchCounts,
        Transformer,
    )

ModelOption = Annotated[
    str | None,
    typer.Option(help="A name, such as gpt3-175b or llama3-70b; or a Hugging Face config.json."),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(help="DEVICE:COUNT, such as a100:1024 or h100:64; or a .json file."),
]
TopologyOption = Annotated[
    str | None,
    typer.Option(
        help="The whole network, whose ranks are the devices: torus:8x8, dgx:8/fat_tree:k=4 or a "
        "file. Exchanges are then simulated."
    ),
]
BatchOption = Annotated[int | None, typer.Option(help="Sequences of a step, over all devices.")]
SeqOption = Annotated[int, typer.Option(help="Tokens of a sequence.")]
MicroBatchOption = Annotated[
    int | None, typer.Option(help="Sequences of a microbatch; by default the fastest that fits.")
]
PrecisionOption = Annotated[str, typer.Option(help="fp32, fp16, bf16, fp8 or fp4.")]
RecomputeOption = Annotated[
    str | None,
    typer.Option(help="none, selective or full; by default the fastest that fits."),
]
LayoutOption = Annotated[
    str | None,
    typer.Option(help="Predict this layout: dp=16,tp=8,pp=8,zero=1; or a .json file."),
]
KeepOption = Annotated[int, typer.Option(help="Number of layouts to print.")]
ExplainOption = Annotated[bool, typer.Option("--explain", help="Print the time as a tree.")]
SaveOption = Annotated[
    Path | None,
    typer.Option(
        "--save", callback=writable, metavar="FILE", help="Write the fastest layout to this file."
    ),
]
ValidateOption = Annotated[
    bool, typer.Option("--validate", help="Print the errors on published runs by source.")
]


def plan(
    *,
    model: ModelOption = None,
    cluster: ClusterOption = None,
    topology: TopologyOption = None,
    batch: BatchOption = None,
    seq: SeqOption = 2048,
    micro_batch: MicroBatchOption = None,
    precision: PrecisionOption = "bf16",
    recompute: RecomputeOption = None,
    layout: LayoutOption = None,
    keep: KeepOption = 10,
    explain: ExplainOption = False,
    save_path: SaveOption = None,
    validate: ValidateOption = False,
    json_path: JsonOption = None,
) -> None:
    """Find the fastest layouts of a training run, with their time and memory.

    The times have an interval that holds 80 % of measured steps.

    With --layout, predict one layout. With --validate, print the errors on published runs.
    """
    if validate:
        _validate(json_path)
        return
    if model is None or cluster is None or batch is None:
        raise typer.BadParameter("--model, --cluster and --batch are needed (or --validate)")
    sizes: dict[str, Any] = {"seq": seq, "global_batch": batch, "micro_batch": micro_batch}
    choices = {**sizes, "precision": precision, "recompute": recompute}
    try:
        where = _cluster(cluster, topology)
        predictions, notes, counts = _predictions(model, where, choices, layout, keep)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    console = result_console(json_path)
    table = _table(predictions, notes, f"{model} on {cluster}, batch {batch} x {seq}")
    _print(console, table, counts, predictions[0] if explain else None)
    _save(predictions[0].layout, save_path, console)
    write_json({"layouts": [_document(each) for each in predictions]}, json_path)


def _print(console: Console, table: Table, counts: str, explained: Prediction | None) -> None:
    console.print(table)
    console.print(counts, style="dim", highlight=False, soft_wrap=True)
    if explained is not None:
        console.print(str(explained.explain()), highlight=False, soft_wrap=True)


def _save(layout: Layout, path: Path | None, console: Console) -> None:
    if path is not None:
        layout.save(path)
        print_written(console, [path])


def _predictions(
    model: str, cluster: Cluster, choices: dict[str, Any], layout: str | None, keep: int
) -> tuple[list[Prediction], list[str], str]:
    """Returns the predictions, a note on each, and a line on the search."""
    from unisono import planner

    job = planner.Workload(**choices)
    shape = planner.load_model(model)
    if layout is not None:
        found = planner.predict(shape, cluster, _layout(layout), job)
        return [found], [_fit_text(found, shape, cluster)], ""
    candidates = planner.search(shape, cluster, job, keep=keep)
    notes = [each.next_lost for each in candidates]
    return [each.prediction for each in candidates], notes, _counts_text(candidates.counts)


def _cluster(text: str, topology: str | None) -> Cluster:
    from unisono.planner import Cluster

    found = Cluster.load(text) if text.endswith(".json") else Cluster.parse(text)
    if topology is None:
        return found
    from unisono.topology import load

    return replace(found, topology=load(topology))


def _layout(text: str) -> Layout:
    from unisono.planner import Layout

    return Layout.load(text) if text.endswith(".json") else Layout.parse(text)


def _counts_text(counts: SearchCounts) -> str:
    return (
        f"{counts.considered} combinations: {counts.predicted} predicted, {counts.too_large} too "
        f"large for the memory, {counts.bounded} slower by their lower bound"
    )


def _fit_text(prediction: Prediction, model: Transformer, cluster: Cluster) -> str:
    """Returns the smallest change that makes a layout fit, if it does not."""
    from unisono.planner import smallest_change

    if prediction.fits:
        return ""
    change = smallest_change(model, cluster, prediction.layout, prediction.job)
    if change is None:
        return "does not fit; no two changes make it fit"
    return f"does not fit; fits with {change.text}: {change.prediction.step_s:.4g} s"


def _table(predictions: Sequence[Prediction], notes: Sequence[str], title: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("layout", "micro", "recompute", "step", "80 % interval", "memory", "MFU"):
        table.add_column(name, justify="left" if name in ("layout", "recompute") else "right")
    table.add_column("the next one" if len(predictions) > 1 else "what fits")
    for each, note in zip(predictions, notes, strict=True):
        table.add_row(
            each.layout.text(),
            str(each.job.micro_batch),
            each.job.recompute,
            f"{each.step_s:.4g} s",
            f"{each.low_s:.4g} to {each.high_s:.4g} s",
            f"{each.memory_bytes / 1e9:.1f} GB",
            f"{each.mfu:.1%}",
            note,
        )
    return table


def _document(prediction: Prediction) -> dict[str, Any]:
    return {
        "layout": asdict(prediction.layout),
        "job": asdict(prediction.job),
        "step_s": prediction.step_s,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        "time_s": dict(prediction.time),
        "memory_bytes": prediction.memory_bytes,
        "memory_bytes_by_kind_and_stage": dict(prediction.memory),
        "mfu": prediction.mfu,
        "tokens_per_s": prediction.tokens_per_s,
    }


def _validate(json_path: str | None) -> None:
    from unisono import planner

    rows, memory = planner.validate(), planner.validate_memory()
    console = result_console(json_path)
    console.print(_errors_table(rows))
    console.print(_memory_table(memory))
    console.print(_constants_table())
    document = {
        "errors": [asdict(row) for row in rows],
        "memory": [
            {
                "source": each.run.source,
                "name": each.run.note,
                "measured_bytes": each.run.memory_bytes,
                "predicted_bytes": each.predicted_bytes,
            }
            for each in memory
        ],
        "constants": planner.constants_document()["constants"],
    }
    write_json(document, json_path)


def _errors_table(rows: Sequence[ErrorRow]) -> Table:
    from rich.table import Table

    table = Table(title="step time: mean absolute error by source", title_justify="left")
    names = ("source", "runs", "fitted", "held out", "worst", "in interval", "tau", "regret")
    for name in names:
        table.add_column(name, justify="left" if name == "source" else "right")
    for row in rows:
        table.add_row(
            row.family,
            str(row.runs),
            f"{row.fitted:.1%}",
            f"{row.held_out:.1%}",
            f"{row.worst:.0%}",
            f"{row.covered:.0%}",
            "-" if row.tau is None else f"{row.tau:.2f}",
            "-" if row.regret is None else f"{row.regret:.1%}",
        )
    table.caption = (
        "fitted: constants fitted to all sources. held out, and all columns after it: constants "
        "fitted to the other sources. tau, regret: order of runs that differ in layout only."
    )
    return table


def _memory_table(rows: Sequence[MemoryComparison]) -> Table:
    from rich.table import Table

    table = Table(title="reserved memory of a device", title_justify="left")
    for name in ("source", "run", "measured", "predicted", "error"):
        table.add_column(name, justify="left" if name in ("source", "run") else "right")
    for each in rows:
        measured = each.run.memory_bytes or 0.0
        table.add_row(
            each.run.source,
            each.run.note,
            f"{measured / 2**30:.1f} GiB",
            f"{each.predicted_bytes / 2**30:.1f} GiB",
            f"{each.predicted_bytes / measured - 1:+.0%}",
        )
    return table


def _constants_table() -> Table:
    from rich.table import Table

    from unisono.planner import constants_document

    table = Table(title="constants", title_justify="left")
    for name in ("constant", "value", "unit", "prior", "fitted to"):
        table.add_column(name, justify="right" if name in ("value", "prior") else "left")
    for name, entry in constants_document()["constants"].items():
        sources = ", ".join(entry.get("fitted_to", [])) or "stated, not fitted"
        table.add_row(
            name, f"{entry['value']:.4g}", entry["unit"], f"{entry['prior']:.4g}", sources
        )
    return table
