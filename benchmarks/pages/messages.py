"""The part of the results about point-to-point, from the JSON documents of `p2p.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

from pages.sweeps import Sample, samples_of
from pages.target_rows import HEAD, target_row
from unisono.bench.sizes import format_size

Document = dict[str, Any]

MIB = 1 << 20
TINY = 8
PEER = "openmpi"
MEAN_BAR, WORST_BAR, MANY_RANKS_BAR = 1.3, 0.9, 1.2
NATIVE_S, TORCH_S, CALL_S = 0.6e-6, 5e-6, 3e-6
OVER_LINK, OVER_GLOO_HOSTS = 1.02, 2.0
OVER_GLOO = {TINY: 10.0, 16 * MIB: 3.0}
MOST_BYTES = 16 * MIB
NAMES = {"ping_pong": "half round trip", "stream": "stream"}


def render_p2p(documents: Mapping[str, Document]) -> list[str]:
    """Renders the documents of `p2p.py`, given by part."""
    lines = [
        "`python benchmarks/p2p.py` (root): ranks 0 and 1, 2 and 3, and so on exchange messages,",
        "all pairs at once. Times are per message: half a round trip (ping_pong), or one of the",
        "64 messages that a stream has outstanding (of large ones 128 MiB, or 4). Every message",
        "was verified. Ratios are the peer's time over ours: above 1, ours is faster. If the",
        "cores were near in some rounds, targets use only those rounds.",
        *_others(documents),
        "",
        *HEAD,
        *_targets(documents),
    ]
    for name, document in documents.items():
        draw = TABLES.get(name, _pairs_table)
        lines += ["", f"### {_title(name, document)}", "", *draw(document)]
    return lines


def _others(documents: Mapping[str, Document]) -> Iterator[str]:
    """Yields a sentence about the cores that other processes used."""
    if busy := [d["machine"]["busy_cores"] for d in documents.values() if "machine" in d]:
        yield f"Other processes used at most {max(busy):.1f} cores at the start of a part."


# ---- targets


def _targets(documents: Mapping[str, Document]) -> Iterator[str]:
    makers: dict[str, Callable[[Document], Iterator[str]]] = {
        "n2": _two_ranks,
        "n4": _many_ranks,
        "n8": _many_ranks,
        "torch": _through_torch,
        "hosts": _across_hosts,
        "calls": _calls,
        "memory": _memory,
        "pipeline": _pipeline,
    }
    for name, make in makers.items():
        if name in documents:
            yield from make(documents[name])


def _by_op(document: Document) -> Iterator[tuple[str, list[Sample]]]:
    """Yields each operation's name and rows. A row includes only its rounds on near cores (low
    latency between cores), if it has any.
    """
    samples = [sample.within("near") or sample for sample in samples_of(document)]
    for op, what in NAMES.items():
        if chosen := [sample for sample in samples if sample.op == op]:
            yield f"{what}, n = {chosen[0].ranks}", chosen


def _two_ranks(document: Document) -> Iterator[str]:
    for what, samples in _by_op(document):
        yield from _against_peer(what, samples, MEAN_BAR, WORST_BAR)
        yield from _tiny(what, samples, NATIVE_S)


def _many_ranks(document: Document) -> Iterator[str]:
    for what, samples in _by_op(document):
        yield from _against_peer(what, samples, MANY_RANKS_BAR, None)
        yield from _tiny(what, samples, None)


def _against_peer(
    what: str, samples: Sequence[Sample], mean_bar: float, worst_bar: float | None
) -> Iterator[str]:
    """Yields the target rows for the geometric mean over all sizes and for the worst size."""
    ratios = [(ratio, s) for s in samples if (ratio := s.ratio(PEER)) is not None]
    if not ratios:
        return
    mean = geometric_mean(ratio for ratio, _ in ratios)
    name = f"{what}: {PEER}'s time over ours"
    yield _least(f"{name}, geometric mean of {len(ratios)} sizes", mean_bar, mean)
    least, worst = min(ratios, key=lambda item: item[0])
    where = f" ({format_size(worst.size_bytes)})"
    if worst_bar is None:
        yield target_row(f"{name}, worst size", "-", f"{least:.2f}{where}", None)
    else:
        yield _least(f"{name}, worst size", worst_bar, least, where)


def _tiny(what: str, samples: Sequence[Sample], most_s: float | None) -> Iterator[str]:
    """Yields the target rows for 8 bytes: half of a round trip, and a stream's message rate."""
    found = next((s for s in samples if s.size_bytes == TINY), None)
    if found is None or found.time_s is None:
        return
    if found.op == "ping_pong":
        if most_s is not None:
            yield _under(f"{what}, 8 B", most_s, found.time_s)
    elif (ratio := found.ratio(PEER)) is not None:
        per_s = found.ranks / 2 / found.time_s
        least = MEAN_BAR if found.ranks == 2 else MANY_RANKS_BAR
        name = f"{what}, 8 B: messages a second over {PEER}'s"
        yield _least(name, least, ratio, f" ({per_s:,.0f})")


def _through_torch(document: Document) -> Iterator[str]:
    for what, samples in _by_op(document):
        for sample in samples:
            wanted, ratio = OVER_GLOO.get(sample.size_bytes), sample.ratio("gloo")
            if wanted is not None and ratio is not None:
                size = format_size(sample.size_bytes)
                yield _least(f"{what}, torch, {size}: gloo's time over ours", wanted, ratio)
            tiny = (sample.op, sample.size_bytes) == ("ping_pong", TINY)
            if tiny and sample.time_s is not None:
                yield _under(f"{what}, torch, 8 B", TORCH_S, sample.time_s)


def _across_hosts(document: Document) -> Iterator[str]:
    rate = document["settings"]["cluster"]["rate"]
    for row in document["rows"]:
        name = f"{NAMES[row['op']]}, 2 hosts, {rate}, {format_size(row['size_bytes'])}"
        results = row["results"]
        over_link = results["unisono"]["time_over_limit"]
        if row["size_bytes"] >= MIB and over_link is not None:
            shown = round(over_link, 3)
            wanted = f"<= {OVER_LINK:g}"
            yield target_row(
                f"{name}: ours over the link", wanted, f"{shown:.3f}", shown <= OVER_LINK
            )
        over_ours = results.get("gloo", {}).get("time_over_ours")
        if (row["op"], row["size_bytes"]) == ("ping_pong", TINY) and over_ours is not None:
            yield _least(f"{name}: gloo's time over ours", OVER_GLOO_HOSTS, over_ours)


def _calls(document: Document) -> Iterator[str]:
    for row in document["rows"]:
        name = f"asynchronous {row['call']} of 8 B, {row['api']}: time of the call"
        yield _under(name, CALL_S, median(row["times_s"]))


def _memory(document: Document) -> Iterator[str]:
    for row in document["rows"]:
        name = f"memory of {_load(row)} unexpected messages, {_hosts(row)}"
        if error := row.get("error"):
            yield target_row(name, "< 16 MiB", error, False)
            continue
        shown = f"{row['growth_bytes'] / MIB:.1f} MiB"
        yield target_row(
            name, "< 16 MiB", shown, row["growth_bytes"] < MOST_BYTES and not row["wrong"]
        )


def _pipeline(document: Document) -> Iterator[str]:
    for row in document["rows"]:
        size = format_size(row["message_bytes"])
        name = f"1F1B, {document['stages']} stages, messages of {size}: gloo's step over ours"
        yield _least(name, 1.0, row["time_s"]["gloo"] / row["time_s"]["unisono"])


def _least(name: str, wanted: float, measured: float, more: str = "") -> str:
    shown = round(measured, 2)
    return target_row(name, f">= {wanted:g}", f"{shown:.2f}{more}", shown >= wanted)


def _under(name: str, most_s: float, time_s: float) -> str:
    shown = round(time_s * 1e6, 2)
    return target_row(name, f"< {most_s * 1e6:g} us", f"{shown:.2f} us", shown < most_s * 1e6)


# ---- tables


def _title(name: str, document: Document) -> str:
    if name == "calls":
        return f"Time of a call, in bursts of {document['burst']}"
    if name == "memory":
        return "Memory of unexpected messages"
    if name == "pipeline":
        return f"Pipeline of {document['stages']} stages, 1F1B"
    where = "through torch" if name == "torch" else "native"
    if name == "hosts":
        where = f"2 hosts, {document['settings']['cluster']['rate']}"
    return f"{document['rows'][0]['ranks']} ranks, {where}"


def _pairs_table(document: Document) -> Iterator[str]:
    ours, limit = document["ours"], document["limit"]
    names = dict.fromkeys(name for row in document["rows"] for name in row["results"])
    peers = [name for name in names if name not in (ours, limit)]
    head = ["operation", "size", f"{ours}, us", "p25-p75", *(f"{p}, us" for p in peers)]
    head += ["limit, us", "GB/s of all pairs", "messages/s", *(f"{p} / ours" for p in peers)]
    yield from _head([*head, "core", "wrong"])
    for row, sample in zip(document["rows"], samples_of(document), strict=True):
        results = row["results"]
        own = results[ours]
        cells = [row["op"], format_size(row["size_bytes"]), _us(own["time_s"]), _spread(own)]
        cells += [_us(results.get(name, {}).get("time_s")) for name in (*peers, limit)]
        rate, per_s = own["busbw_Bps"], own["messages_per_s"]
        cells += ["-" if rate is None else f"{rate / 1e9:.3g}"]
        cells += ["-" if per_s is None else f"{per_s:,.0f}"]
        ratios = [results.get(peer, {}).get("time_over_ours") for peer in peers]
        cells += ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        yield _line([*cells, sample.mode, str(sample.wrong)])
    for name, reason in document["skipped"].items():
        yield from ("", f"Without {name}: {reason.splitlines()[-1]}")


def _calls_table(document: Document) -> Iterator[str]:
    yield from _head(["interface", "call", "time, us", "wrong"])
    for row in document["rows"]:
        yield _line([row["api"], row["call"], _us(median(row["times_s"])), str(row["wrong"])])
    for row in document.get("floor", []):
        api = f'{row["api"]}, backend "fake"'
        yield _line([api, row["call"], _us(median(row["times_s"])), "-"])
    if "floor" in document:
        yield from ("", _FLOOR)


_FLOOR = """\
The backend "fake" of torch does nothing: its rows are torch's own time, which no backend can
remove. Half a round trip through torch needs a blocking send and a blocking receive."""


def _memory_table(document: Document) -> Iterator[str]:
    yield from _head(
        ["messages", "where", "growth while it waited, MiB", "maximum growth, MiB", "wrong"]
    )
    for row in document["rows"]:
        if error := row.get("error"):
            yield _line([_load(row), _hosts(row), error, "-", "-"])
            continue
        grew = [f"{row[key] / MIB:.1f}" for key in ("waiting_bytes", "growth_bytes")]
        yield _line([_load(row), _hosts(row), *grew, str(row["wrong"])])


def _pipeline_table(document: Document) -> Iterator[str]:
    yield from _head(["microbatches", "message", "unisono, ms", "gloo, ms", "gloo / ours", "wrong"])
    for row in document["rows"]:
        ours, gloo = row["time_s"]["unisono"], row["time_s"]["gloo"]
        cells = [str(row["microbatches"]), format_size(row["message_bytes"])]
        cells += [f"{ours * 1e3:.2f}", f"{gloo * 1e3:.2f}", f"{gloo / ours:.2f}"]
        yield _line([*cells, str(row["wrong"])])


def _load(row: Document) -> str:
    return f"{row['messages']:,} x {format_size(row['nbytes'])}"


def _hosts(row: Document) -> str:
    return "one host" if row["hosts"] == 1 else f"{row['hosts']} hosts"


def _spread(result: Document) -> str:
    return "-".join(map(_us, result["spread_s"])) if result["spread_s"] else "-"


def _us(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.2f}" if seconds < 1e-4 else f"{seconds * 1e6:.0f}"


def _head(cells: Sequence[str]) -> list[str]:
    return [_line(cells), "|" + "---|" * len(cells)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


TABLES = {"calls": _calls_table, "memory": _memory_table, "pipeline": _pipeline_table}
