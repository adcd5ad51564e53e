"""The first page of results, benchmarks/RESULTS.md, from the JSON documents of `sweep.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import geometric_mean, median
from typing import Any

from pages.target_rows import HEAD, at_most, target_row
from unisono.bench.cases import OPERATIONS
from unisono.bench.core_latency import FAR_S, describe_latency
from unisono.bench.sizes import format_size

Document = dict[str, Any]

LARGE_BYTES = 64 << 20
OURS = {"unisono": "native", "unisono-torch": "torch"}
# Milliseconds of a prototype of the executor on near cores, for 64 MiB with (2, 4) ranks. Times on
# far cores exist for all_reduce only.
NEAR_MS = {
    "all_reduce": (6.0, 15.0),
    "all_gather": (3.8, 6.6),
    "broadcast": (4.1, 6.6),
    "all_to_all": (6.0, 11.8),
    "reduce_scatter": (6.1, 12.0),
}
LIMIT_FACTOR = 1.3
MIN_ROUNDS = 2
FAR_MS = {"all_reduce": (6.9, 25.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Our time for one case, with the measurements of all contestants."""

    api: str
    op: str
    ranks: int
    size_bytes: int
    mode: str
    rounds_s: dict[str, tuple[float, ...]]
    probes_s: tuple[float, ...]
    ours: str
    wrong: int

    @property
    def times_s(self) -> dict[str, float]:
        """Median seconds by contestant."""
        return {name: median(rounds) for name, rounds in self.rounds_s.items()}

    def within(self, mode: str) -> Sample | None:
        """Returns the sample with only those rounds at whose start and end the cores were near (or
        far). Returns None if there are too few such rounds.
        """
        far = [probe_s >= FAR_S for probe_s in self.probes_s]
        kept = [i for i in range(len(far) - 1) if far[i] == far[i + 1] == (mode == "far")]
        if len(kept) < MIN_ROUNDS:
            return None
        rounds = {name: tuple(each[i] for i in kept) for name, each in self.rounds_s.items()}
        return replace(self, mode=mode, rounds_s=rounds)

    @property
    def time_s(self) -> float | None:
        return self.times_s.get(self.ours)

    def ratio(self, peer: str) -> float | None:
        """Returns the peer's time divided by our time."""
        if self.time_s is None or peer not in self.times_s:
            return None
        return self.times_s[peer] / self.time_s


def render_page(documents: list[Document], links: Mapping[str, str]) -> str:
    """Returns the page. `links` has the contents of the other pages by their paths."""
    samples = [sample for document in documents for sample in samples_of(document)]
    samples.sort(
        key=lambda sample: list(OPERATIONS).index(sample.op)
    )  # the sort is stable, so that sizes keep their order
    lines = ["# Results", "", *_preface(documents)]
    if links:
        lines += ["", "| other results | |", "|---|---|"]
        lines += [f"| [{path}]({path}) | {text} |" for path, text in links.items()]
    lines += ["", "## Targets", "", *_targets(samples)]
    for api, ranks in sorted({(sample.api, sample.ranks) for sample in samples}):
        chosen = [s for s in samples if (s.api, s.ranks) == (api, ranks)]
        lines += ["", f"## {api}, {ranks} ranks", "", *render_table(chosen)]
    return "\n".join(lines) + "\n"


def render_train(task: str, document: Document) -> Iterator[str]:
    """Yields, for a document of `unisono train --json`, a row for each measure, with a column for
    each backend. The last column is the ratio of the last backend to the first backend.
    """
    runs, ranks = document["runs"], document["settings"]["ranks"]
    yield f"`unisono train {task} -n {ranks}`; the backends alternated; the loss curves "
    yield "agree to float tolerance." if document["ok"] else f"FAILED: {document['failures']}."
    yield ""
    yield "| measure | " + " | ".join(run["backend"] for run in runs) + " | ratio |"
    yield "|---" * (len(runs) + 2) + "|"
    for key, label in (
        ("step_median_s", "training step, ms"),
        ("compute_median_s", "forward + backward without exchange, ms"),
        ("exchange_median_s", "communication: gradients alone, ms (target: a fifth)"),
        ("added_median_s", "communication: added to a step, ms"),
    ):
        values = [run[key] * 1e3 for run in runs]
        shown = " | ".join(f"{value:.2f}" for value in values)
        yield f"| {label} | {shown} | {values[-1] / values[0]:.2f} |"
    scores = " | ".join(f"{run['score']:.4g}" for run in runs)
    yield f"| score | {scores} | |"


def samples_of(document: Document) -> Iterator[Sample]:
    """Yields a sample for each row of a document of `run_benchmark`."""
    for row in document["rows"]:
        results = row["results"]
        yield Sample(
            api=OURS[document["ours"]],
            op=row["op"],
            ranks=row["ranks"],
            size_bytes=row["size_bytes"],
            mode=describe_latency(row["probes_s"]),
            rounds_s={name: tuple(r["times_s"]) for name, r in results.items() if r["times_s"]},
            probes_s=tuple(row["probes_s"]),
            ours=document["ours"],
            wrong=sum(result["wrong"] for result in results.values()),
        )


def machine_text(documents: list[Document]) -> str:
    """Returns one line about the machine of the documents."""
    if not documents:
        return "Nothing was measured yet: `python benchmarks/sweep.py`."
    machine = documents[0]["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, "
        f"Python {machine['python']}; {packages}."
    )


def _preface(documents: list[Document]) -> list[str]:
    if not documents:
        return [machine_text(documents)]
    busy = max(document["machine"]["busy_cores"] for document in documents)
    rounds = sorted({document["settings"]["rounds"] for document in documents})
    return [
        machine_text(documents),
        "",
        "`python benchmarks/sweep.py`: all contestants of a row alternate in one run. Times are",
        f"medians in microseconds, of {' or '.join(map(str, rounds))} rounds (`--rounds`). Every",
        "element of every result was verified on every rank. Ratios are the peer's time over",
        "ours: above 1, ours is faster. `core` is the one-way latency between cores during the",
        "row in ns: near is below 100, far above, mixed if it changed. Targets of a mode are",
        "medians of the rounds with this mode before and after them. Other processes used at most",
        f"{busy:.1f} cores at the start of a part.",
    ]


def _targets(samples: list[Sample]) -> list[str]:
    lines = [*HEAD, *_ratio_targets(samples)]
    for mode, trial_ms, factor in (("near", NEAR_MS, 1.15), ("far", FAR_MS, 1.3)):
        for op, per_ranks in trial_ms.items():
            for ranks, trial in zip((2, 4), per_ranks, strict=True):
                lines += _large_targets(samples, mode, op, ranks, trial * factor)
    lines += _many_ranks_targets(samples)
    return lines


def _ratio_targets(samples: list[Sample]) -> Iterator[str]:
    for api, peer, mean_bar, least_bar in (
        ("torch", "gloo", 10.0, 2.0),
        ("native", "openmpi", 1.5, 1 / 1.25),
    ):
        chosen = [s for s in samples if s.api == api and s.ranks in (2, 4)]
        if api == "torch":
            chosen = [s for s in chosen if s.size_bytes >= 1 << 10]
        ratios = [(ratio, s) for s in chosen if (ratio := s.ratio(peer)) is not None]
        if not ratios:
            continue
        mean = geometric_mean(ratio for ratio, _ in ratios)
        least, worst = min(ratios, key=lambda item: item[0])
        where = f"{worst.op} {format_size(worst.size_bytes)} n={worst.ranks}"
        yield target_row(
            f"{api}: {peer}'s time over ours, geometric mean of {len(ratios)} rows",
            f">= {mean_bar:g}",
            f"{mean:.2f}",
            mean >= mean_bar,
        )
        yield target_row(
            f"{api}: the same, worst row",
            f">= {least_bar:g}",
            f"{least:.2f} ({where})",
            least >= least_bar,
        )


def _large_targets(
    samples: list[Sample], mode: str, op: str, ranks: int, most_ms: float
) -> Iterator[str]:
    """Yields a row that compares our time with the prototype's, which ran on another machine. With
    near cores, also yields a row that compares our time with this machine's limit.
    """
    row = _find(samples, op, ranks, LARGE_BYTES)
    name, wanted = f"{op} 64 MiB n={ranks}, {mode}", f"<= {most_ms:.1f} ms"
    found = row.within(mode) if row else None
    if row is None or found is None or found.time_s is None:
        yield target_row(name, wanted, f"no rounds in {mode} mode", None)
        return
    rounds = f"{len(found.rounds_s[found.ours])} of {len(row.rounds_s[row.ours])} rounds"
    time_ms = found.time_s * 1e3
    yield target_row(name, wanted, f"{time_ms:.1f} ms in {rounds}", time_ms <= most_ms)
    if mode == "near" and (ratio := found.ratio("memory")) is not None:
        yield at_most(f"{name}: over the limit", LIMIT_FACTOR, 1 / ratio, ".2f")


def _many_ranks_targets(samples: list[Sample]) -> Iterator[str]:
    small = _find(samples, "all_reduce", 8, 8)
    if small is not None and small.time_s is not None:
        time_us = small.time_s * 1e6
        yield target_row("all_reduce 8 B n=8", "< 60 us", f"{time_us:.1f} us", time_us < 60)
    large, fewer = (_find(samples, "all_reduce", n, LARGE_BYTES) for n in (8, 4))
    if large is None or fewer is None:
        return
    modes = [(large.within(mode), fewer.within(mode), mode) for mode in ("near", "far")]
    alike = [(a, b, mode) for a, b, mode in modes if a and b]
    for many, few, mode in alike or [(large, fewer, f"{fewer.mode} / {large.mode}")]:
        if many.time_s and few.time_s:
            ratio = many.time_s / few.time_s
            shown = f"{ratio:.2f}"
            if "memory" in many.times_s and "memory" in few.times_s:
                limit = many.times_s["memory"] / few.times_s["memory"]
                shown += f" (the limit: {limit:.2f})"
            yield target_row(f"all_reduce 64 MiB, n=8 over n=4, {mode}", "<= 2", shown, ratio <= 2)


def _find(samples: list[Sample], op: str, ranks: int, size_bytes: int) -> Sample | None:
    wanted = ("native", op, ranks, size_bytes)
    return next((s for s in samples if (s.api, s.op, s.ranks, s.size_bytes) == wanted), None)


def render_table(samples: list[Sample]) -> list[str]:
    """Returns a table with a row for each sample. All samples have the same interface."""
    ours = samples[0].ours
    names = dict.fromkeys(name for sample in samples for name in sample.times_s)
    peers = [name for name in names if name not in (ours, "memory")]
    head = ["operation", "size", ours, *peers, "limit", *(f"{p} / ours" for p in peers)]
    head += ["ours / limit", "core", "wrong"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for sample in samples:
        times = [_time(sample.times_s.get(name)) for name in (ours, *peers, "memory")]
        ratios = [_ratio(sample.ratio(peer)) for peer in peers]
        limit = sample.ratio("memory")
        cells = [sample.op, format_size(sample.size_bytes), *times, *ratios]
        cells += [_ratio(1 / limit if limit else None), sample.mode, str(sample.wrong)]
        lines.append("| " + " | ".join(cells) + " |")
    means = []
    for peer in peers:
        ratios_of_peer = [ratio for s in samples if (ratio := s.ratio(peer)) is not None]
        if ratios_of_peer:
            means.append(f"{peer} / ours {geometric_mean(ratios_of_peer):.2f}")
    return [*lines, "", f"Geometric mean: {', '.join(means) or '-'}."]


def _time(time_s: float | None) -> str:
    if time_s is None:
        return "-"
    time_us = time_s * 1e6
    return f"{time_us:.2f}" if time_us < 100 else f"{time_us:.0f}"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
