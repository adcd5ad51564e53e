"""Parts of the results about training: parameter servers, compression, tuned fusion, the
timeline's cost, parallel steps and pipeline bubbles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from statistics import median
from typing import Any

from timing import microseconds, milliseconds

from pages.target_rows import HEAD, at_most

Document = dict[str, Any]
Renderer = Callable[[Document], Iterator[str]]

SERVER_BAR, RECORD_BAR, BUBBLE_BAR, FORECAST_BAR = 1.3, 0.01, 0.05, 0.15
_TUNING_STEPS = 140  # number of steps in benchmarks/fusion_tuning.py
_OURS, _ON_UNISONO, _ON_GLOO = "parallelize", "torch on unisono", "torch on gloo"


def render_training(documents: Mapping[str, Document]) -> list[str]:
    """Renders the documents in `PARTS`, given by the names of their result files."""
    lines: list[str] = []
    for name, draw in PARTS.items():
        if name in documents:
            lines += ["", *draw(documents[name])] if lines else draw(documents[name])
    return lines


def _servers(document: Document) -> Iterator[str]:
    yield "`python benchmarks/parameter_server_steps.py`: synchronous training steps of 4"
    yield "workers, on hosts of a lab with links of 50 Mbit/s. Parameters equal those of the"
    yield "ring bit by bit, and bytes equal the closed form. The bound is the bytes of the"
    yield "busiest rank over the link's rate."
    yield from ("", *HEAD)
    for row in document["rows"]:
        if row["name"] != "ring":
            what = f"{row['name']}, {row['nbytes'] >> 20} MiB: time over the bound"
            yield at_most(what, SERVER_BAR, median(row["times_s"]) / row["bound_s"], ".2f")
    yield from ("", "| servers | busiest rank sends | step, ms | bound, ms |", "|---|---|---|---|")
    for row in document["rows"]:
        share = f"{row['busiest_bytes'] / row['nbytes']:.2f} B"
        times = f"{milliseconds(row['times_s'])} | {1e3 * row['bound_s']:.1f}"
        yield f"| {row['name']} | {share} | {times} |"


def _compression(document: Document) -> Iterator[str]:
    yield "`python benchmarks/compression_steps.py`: steps with compressed gradients over steps"
    yield "without compression, alternating. On shared memory the computation of a code costs"
    yield "more than it saves; on a slower link it pays."
    yield from ("", "| compression | wire | ranks | time over dense | bytes over dense |")
    yield "|---|---|---|---|---|"
    for row in document["rows"]:
        pairs = zip(row["compressed_s"], row["dense_s"], strict=True)
        ratio = median(compressed / dense for compressed, dense in pairs)
        size = row["compressed_bytes"] / row["dense_bytes"]
        name = row["name"].split("(")[0]
        yield f"| {name} | {row['wire']} | {row['ranks']} | {ratio:.2f} | {size:.3f} |"


def _fusion(document: Document) -> Iterator[str]:
    yield "`python benchmarks/fusion_tuning.py`: steps with fusion that tunes itself over steps"
    yield "with the buckets of `fusion_bytes`, in pairs, after the tuner has decided."
    yield from ("", "| case | ranks | default, ms | tuned, ms | tuned over default | decision |")
    yield "|---|---|---|---|---|---|"
    for row in document["rows"]:
        default, tuned = row["default_s"][_TUNING_STEPS:], row["tuned_s"][_TUNING_STEPS:]
        ratio = median(b / a for a, b in zip(default, tuned, strict=True))
        report = row["report"]
        text = report if isinstance(report, str) else report["reason"]
        times = " | ".join(f"{1e3 * median(each):.3f}" for each in (default, tuned))
        yield f"| {row['case']} | {row['ranks']} | {times} | {ratio:.3f} | {text} |"


def _timeline(document: Document) -> Iterator[str]:
    yield "`python benchmarks/timeline_cost.py`: processor time of the recorded events of a"
    yield "step over that of the step."
    yield from ("", *HEAD)
    for row in document["rows"]:
        share = 1e-9 * row["event_ns"] * row["events_per_step"] / row["cpu_s"]
        what = f"{row['model']}, n = {row['ranks']}: record over a step"
        yield at_most(what, RECORD_BAR, share, ".2%")


def _steps(document: Document) -> Iterator[str]:
    yield "`python benchmarks/parallel_steps.py`: steps of `parallelize` beside torch's own"
    yield "strategies on the backends unisono and Gloo, alternating, with equal losses; medians"
    yield "(quartiles)."
    yield from ("", *HEAD)
    for row in document["rows"]:
        for other in (_ON_UNISONO, _ON_GLOO):
            pairs = zip(row["times_s"][_OURS], row["times_s"][other], strict=True)
            ratio = median(ours / theirs for ours, theirs in pairs)
            what = f"{row['model']}, {row['strategy']}, n = {row['ranks']}: over {other}"
            yield at_most(what, 1.0, ratio, ".2f")
    yield from ("", f"| model | strategy | {_OURS}, ms | {_ON_UNISONO}, ms | {_ON_GLOO}, ms |")
    yield "|---|---|---|---|---|"
    for row in document["rows"]:
        times = " | ".join(
            milliseconds(row["times_s"][who]) for who in (_OURS, _ON_UNISONO, _ON_GLOO)
        )
        yield f"| {row['model']} | {row['strategy']} | {times} |"


def _between_hosts(document: Document) -> Iterator[str]:
    yield "`python benchmarks/parallel_hosts.py` (root): steps of a chain of linear layers, 33.6 MB"
    yield "of gradients, on two hosts of a lab with links of 1 Gbit/s, which need 269 ms for these"
    yield "bytes. All contestants alternate, with equal losses and weights. *after the passes* is"
    yield "`parallelize(..., overlap=False)`."
    yield from ("", *HEAD)
    for row in document["rows"]:
        # ZeRO-1 gathers weights after the optimizer's step, which no pass hides
        others = ("data_parallel", "DDP") if row["strategy"] == "data" else ("after the passes",)
        for other in others:
            pairs = zip(row["times_s"][_OURS], row["times_s"][other], strict=True)
            ratio = median(ours / theirs for ours, theirs in pairs)
            yield at_most(f"{row['strategy']}: parallelize over {other}", 1.0, ratio, ".2f")
    every = list(document["rows"][0]["times_s"])
    yield from ("", f"| strategy | {' | '.join(f'{who}, ms' for who in every)} |")
    yield "|---" * (1 + len(every)) + "|"
    for row in document["rows"]:
        times = " | ".join(milliseconds(row["times_s"][who]) for who in every)
        yield f"| {row['strategy']} | {times} |"


def _context(document: Document) -> Iterator[str]:
    yield "`python benchmarks/context_attention.py` (root): causal attention, forward and"
    yield "backward, over a sequence that the ranks divide. *hidden*: part of the ring's"
    yield "messages that attention hides."
    kinds = ("one process", "ring", "ulysses", "allgather")
    heads = ("network", "ranks", "length", *(f"{kind}, ms" for kind in kinds), "hidden")
    heads = (*heads, *(f"{kind}, peak MiB" for kind in kinds))
    yield from ("", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads))
    for row in document["rows"]:
        times = [f"{1e3 * median(row['seconds'][kind]):.1f}" for kind in kinds]
        hidden = "" if row["hidden"] is None else f"{row['hidden']:.0%}"
        peaks = [f"{row['peak_bytes'][kind] / 2**20:.1f}" for kind in kinds]
        places = (row["network"], str(row["ranks"]), str(row["length"]))
        yield "| " + " | ".join((*places, *times, hidden, *peaks)) + " |"


def _experts(document: Document) -> Iterator[str]:
    yield "`python benchmarks/expert_exchange.py`: tokens go to their experts and back, forward and"
    yield "backward; the experts compute nothing (rows of 1 KiB, 2 of 8 experts). *puts*: that of"
    yield "`parallelize`. *all_to_all*: torch's `all_to_all_single` on unisono. *gloo*: the same on"
    yield "Gloo. All contestants alternate, and every row and gradient is verified."
    ways = ("puts", "all_to_all", "gloo")
    heads = ("ranks", "tokens", *(f"{way}, us" for way in ways), "all_to_all / puts", "gloo / puts")
    yield from ("", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads))
    for row in document["rows"]:
        times = [row["seconds"][way] for way in ways]
        own, *others = map(median, times)
        ratios = [f"{other / own:.1f}" for other in others]
        cells = (row["ranks"], row["tokens"], *map(microseconds, times), *ratios)
        yield f"| {' | '.join(map(str, cells))} |"


def _figures(document: Document) -> Iterator[str]:
    yield "`python benchmarks/predicted_bytes_memory.py`: each strategy trains the same model"
    yield "to the losses of one process (1e-5, float32). Figures of a step in KiB, of the rank with"
    yield "most; in brackets what the closed forms predict, if it differs by more than 2 %."
    yield "Memory is that between two steps, when ZeRO-2 too has divided its weights."
    heads = ("task", "layout", "microbatches", "sent", "weights", "gradients", "optimizer")
    yield from ("", f"| {' | '.join((*heads, 'bubble', 'step, ms', 'peak, MiB'))} |")
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in document["rows"]:
        yield "| " + " | ".join(_figure_cells(row)) + " |"


def _figure_cells(row: Document) -> Iterator[str]:
    predicted = row["predicted"]
    further = "".join(f" {value}" for value in row["settings"].values())
    yield from (row["task"], row["layout"] + further, str(row["microbatches"]))
    known = {axis: each for axis, each in row["bytes_sent"].items() if axis != "world"}
    yield _compared(_most(known), _most(predicted["bytes_sent"]))
    for kind in ("weights", "gradients", "optimizer"):
        pair = (max(found["memory"].get(kind, [0])) for found in (row, predicted))
        yield _compared(*pair)
    pipeline = "pp" in row["layout"]
    yield f"{row['bubble']:.1%} ({predicted['bubble']:.1%})" if pipeline else ""
    yield f"{1e3 * row['step_s']:.1f}"
    yield f"{max(row['peak_bytes']) / 2**20:.0f}"


def _most(by_axis: Mapping[str, list[float]]) -> float:
    """Returns the number of bytes that the busiest rank sends."""
    return max(map(sum, zip(*by_axis.values(), strict=True)), default=0.0)


def _compared(measured: float, predicted: float) -> str:
    text = f"{measured / 1024:,.1f}"
    close = abs(measured - predicted) <= 0.02 * max(predicted, 1)
    return text if close else f"{text} ({predicted / 1024:,.1f})"


def _bubbles(document: Document) -> Iterator[str]:
    yield "`python benchmarks/pipeline_bubbles.py`: bubbles of pipelines whose passes sleep."
    yield "The cores do not limit the ranks, so the bubble is that of the schedule and of"
    yield "torch's time between passes."
    yield from (
        "",
        "| schedule | stages | microbatches | predicted | measured | error | within 5 % |",
    )
    yield "|---|---|---|---|---|---|---|"
    for row in document["rows"]:
        measured = median(row["measured"])
        error = measured / row["predicted"] - 1
        mark = "yes" if abs(error) <= BUBBLE_BAR else "**no**"
        places = f"{row['schedule']} | {row['stages']} | {row['microbatches']}"
        yield f"| {places} | {row['predicted']:.4f} | {measured:.4f} | {error:+.1%} | {mark} |"


def _forecasts(document: Document) -> Iterator[str]:
    rows = [
        {
            "layout": row["layout"],
            "ranks": row["ranks"],
            "forecast": median(row["forecast_s"]),
            "measured": median(row["measured_s"]),
        }
        for row in document["rows"]
    ]
    errors = [abs(row["forecast"] / row["measured"] - 1) for row in rows]
    yield "`python benchmarks/step_forecasts.py`: each run profiles the model, forecasts a step,"
    yield "and then trains (`unisono train text --predict`). Medians of three rounds. Mean absolute"
    yield f"error {sum(errors) / len(errors):.1%} (bar {FORECAST_BAR:.0%}); Kendall's tau of the"
    yield (
        "order "
        + ", ".join(f"{_kendall_tau(rows, ranks):.2f} on {ranks} ranks" for ranks in (2, 4))
        + "."
    )
    yield from (
        "",
        "| layout | forecast | measured | error | within 15 % |",
        "|---|---|---|---|---|",
    )
    for row in rows:
        error = row["forecast"] / row["measured"] - 1
        mark = "yes" if abs(error) <= FORECAST_BAR else "**no**"
        times = f"{1e3 * row['forecast']:.1f} ms | {1e3 * row['measured']:.1f} ms"
        yield f"| {row['layout']} | {times} | {error:+.0%} | {mark} |"


def _llama(document: Document) -> Iterator[str]:
    yield "`python benchmarks/llama_steps.py`: steps of a small Llama of transformers, float32,"
    yield "4 ranks, ms (our time over theirs). Accelerate runs torch's DDP on CPUs."
    rows = document["rows"]
    every = list(dict.fromkeys(who for row in rows for who in row["times_s"]))
    yield from ("", f"| layout | {' | '.join(every)} |", "|---" * (1 + len(every)) + "|")
    for row in rows:
        times = row["times_s"]
        cells = [_beside(times[every[0]], times.get(who), who == every[0]) for who in every]
        yield f"| {row['strategy']} | {' | '.join(cells)} |"


def _beside(ours: list[float], theirs: list[float] | None, is_ours: bool) -> str:
    if theirs is None:
        return ""
    ratio = median(a / b for a, b in zip(ours, theirs, strict=True))
    return f"{1e3 * median(theirs):.1f}" + ("" if is_ours else f" ({ratio:.2f})")


def _kendall_tau(rows: list[Document], ranks: int) -> float:
    """Returns Kendall's tau between forecast and measured times of the layouts with `ranks` ranks:
    1 if both have the same order, -1 if the orders are opposite.
    """
    pairs = list(combinations([row for row in rows if row["ranks"] == ranks], 2))
    agree = [
        (a["forecast"] - b["forecast"]) * (a["measured"] - b["measured"]) > 0 for a, b in pairs
    ]
    return 2 * sum(agree) / len(pairs) - 1


PARTS: Mapping[str, Renderer] = {
    "step-forecasts": _forecasts,
    "parallel-figures": _figures,
    "parallel-steps": _steps,
    "parallel-hosts": _between_hosts,
    "llama-steps": _llama,
    "pipeline-bubbles": _bubbles,
    "context-attention": _context,
    "expert-exchange": _experts,
    "parameter-server-steps": _servers,
    "compression-steps": _compression,
    "fusion-tuning": _fusion,
    "timeline-cost": _timeline,
}
