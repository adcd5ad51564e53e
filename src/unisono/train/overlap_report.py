"""The report on the example of overlap, as a table, JSON and a timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from unisono.chrome_trace import (
    TraceEvent,
    process_name,
    slice_event,
    thread_name,
    trace_text,
)
from unisono.train.overlap import CaseResult, Example, OverlapResult

FULL_SCALE = (
    "At full scale, a gradient takes 1 ms to compute and 500 ms to exchange: serial 96 x 12 x "
    "(1 + 500) ms = 577,152 ms, overlapped 1 + 96 x 12 x 500 ms = 576,001 ms. Overlap can hide "
    "1,151 ms of that."
)


def overlap_table(result: OverlapResult) -> Table:
    """Returns a table of the predicted and measured times of all cases."""
    example = result.example
    table = Table(
        title=f"{example.layers} x {example.per_layer} gradients, computation : exchange = "
        f"1 : {example.exchange_s / example.compute_s:g}, "
        f"{example.latency_share:.0%} of an exchange is latency"
    )
    table.add_column("")
    for name in ("messages", "predicted", "measured, median", "lowest", "highest"):
        table.add_column(name, justify="right")
    for each in result.cases:
        seconds = [step.seconds for step in each.steps]
        times = (each.predicted_s, each.measured_s, min(seconds), max(seconds))
        shown = (f"{1e3 * each_s:.1f} ms" for each_s in times)
        table.add_row(each.case.name, str(len(each.case.ends)), *shown)
    return table


def hidden_line(result: OverlapResult) -> str:
    """Returns a line with the time that the overlap hid, also as a share of the hideable time."""
    return (
        f"Overlap hid {1e3 * result.hidden_s:.1f} ms of the {1e3 * result.hideable_s:.1f} ms "
        f"that can be hidden: {result.hidden_s / result.hideable_s:.1%}."
    )


def overlap_json(results: Sequence[OverlapResult]) -> dict[str, Any]:
    """Returns the settings, the predictions and all measured steps as plain data for JSON."""
    return {
        "results": [
            {
                "layers": result.example.layers,
                "per_layer": result.example.per_layer,
                "compute_s": result.example.compute_s,
                "exchange_s": result.example.exchange_s,
                "latency_share": result.example.latency_share,
                "hideable_s": result.hideable_s,
                "hidden_s": result.hidden_s,
                "cases": [
                    {
                        "name": each.case.name,
                        "messages": len(each.case.ends),
                        "predicted_s": each.predicted_s,
                        "measured_s": [step.seconds for step in each.steps],
                    }
                    for each in result.cases
                ],
            }
            for result in results
        ]
    }


def overlap_trace(results: Sequence[OverlapResult]) -> str:
    """Returns the last step of every case as JSON in the Trace Event Format (Google, 2016).

    Each case is a process, with a row for the computation and a row for the link.
    """
    events: list[TraceEvent] = []
    pid = 0
    for result in results:
        for each in result.cases:
            ratio = result.example.exchange_s / result.example.compute_s
            events += _case_events(pid, f"{each.case.name}, 1 : {ratio:g}", each, result.example)
            pid += 1
    return trace_text(events)


def _case_events(pid: int, name: str, result: CaseResult, example: Example) -> Iterator[TraceEvent]:
    step = result.steps[-1]
    yield from process_name(pid, name)
    for tid, row in enumerate(("computation", "link")):
        yield from thread_name(pid, tid, row)
    ended_s = 0.0
    for j, computed_s in enumerate(step.computed_s):
        begun_s = max(ended_s, computed_s - example.compute_s)
        yield slice_event(f"gradient {j}", begun_s, computed_s, pid=pid, tid=0)
        ended_s = computed_s
    for use in step.link:
        yield slice_event(f"{use.tensors} gradients", use.begun_s, use.ended_s, pid=pid, tid=1)
