"""The part of the results about several hosts, from the JSON documents of `hosts.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pages.target_rows import HEAD, target_row
from unisono.bench.sizes import format_size

Document = dict[str, Any]

KIB, MIB = 1 << 10, 1 << 20
OURS, LIMIT = "unisono", "network"
# Targets by part and size: the largest permitted ratio of our time to the limit, and the least
# permitted ratio of a peer's time to our time.
OVER_LIMIT = {
    **{("flat", size * MIB): 1.03 for size in (1, 16, 32)},
    **{(part, size * MIB): 1.06 for part in ("pairs", "wide") for size in (1, 16)},
}
OVER_OURS = {
    ("flat", 8): {"gloo": 5.0},
    ("flat", 64 * KIB): {"gloo": 5.0},
    ("uncapped", 64 * MIB): {"gloo": 1.0, "openmpi": 1.0},
}
RAILS_BAR = 1.9


def render_hosts(documents: Mapping[str, Document]) -> list[str]:
    """Renders documents of `hosts.py`, by part."""
    lines = [
        "`python benchmarks/hosts.py`: hosts of the lab with 1 Gbit/s per link, except in",
        "uncapped parts. The limit is the bytes that any schedule moves between hosts, 2(H-1)/H",
        "of the vector out of each of H hosts, at the payload rate that iperf3 measured just",
        "after the row. A ratio below 1 means that iperf3 measured too low a rate.",
        "",
        *HEAD,
        *_targets(documents),
    ]
    for name, document in documents.items():
        lines += ["", f"### {_title(name, document)}", "", *_table(document)]
    return lines


def _targets(documents: Mapping[str, Document]) -> Iterator[str]:
    for name, document in documents.items():
        for row in document["rows"]:
            where = f"{name}, {format_size(row['size_bytes'])}"
            key = name, row["size_bytes"]
            if key in OVER_LIMIT:
                ratio = row["results"][OURS]["time_over_limit"]
                yield _bar(f"{where}: ours over the limit", "<=", OVER_LIMIT[key], ratio)
            for peer, least in OVER_OURS.get(key, {}).items():
                ratio = row["results"][peer]["time_over_ours"]
                yield _bar(f"{where}: {peer}'s time over ours", ">=", least, ratio)
    if {"one-rail", "two-rails"} <= documents.keys():
        pairs = zip(documents["one-rail"]["rows"], documents["two-rails"]["rows"], strict=True)
        for one, two in pairs:
            ratio = one["results"][OURS]["time_s"] / two["results"][OURS]["time_s"]
            size = format_size(one["size_bytes"])
            yield _bar(f"one rail's time over two rails', {size}", ">=", RAILS_BAR, ratio)


def _bar(name: str, sign: str, wanted: float, measured: float) -> str:
    shown = round(measured, 2)
    reached = shown <= wanted if sign == "<=" else shown >= wanted
    return target_row(name, f"{sign} {wanted:g}", f"{measured:.2f}", reached)


def _title(name: str, document: Document) -> str:
    lab = document["settings"]["cluster"]
    rate = lab["rate"] or "uncapped"
    rails = f", {lab['rails']} rails" if lab["rails"] > 1 else ""
    return f"{name}: {lab['hosts']} hosts x {lab['per_host']} ranks, {rate}{rails}"


def _table(document: Document) -> Iterator[str]:
    peers = [name for name in document["rows"][0]["results"] if name not in (OURS, LIMIT)]
    head = ["all_reduce", "ours, us", "p25-p75", *(f"{peer}, us" for peer in peers), "limit, us"]
    head += [f"{peer} / ours" for peer in peers]
    head += ["ours / limit", *(f"{peer} / limit" for peer in peers), "payload Gbit/s", "wrong"]
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    for row in document["rows"]:
        results = row["results"]
        ours = results[OURS]
        shown = [_us(results[name]["time_s"]) for name in (*peers, LIMIT)]
        spread = "-".join(_us(edge) for edge in ours["spread_s"])
        cells = [format_size(row["size_bytes"]), _us(ours["time_s"]), spread, *shown]
        cells += [f"{results[peer]['time_over_ours']:.2f}" for peer in peers]
        if row["size_bytes"] >= MIB:
            cells += [f"{results[name]['time_over_limit']:.2f}" for name in (OURS, *peers)]
        else:  # a few bytes take almost no time on the link, which therefore sets no limit
            cells += ["-"] * (1 + len(peers))
        cells += [f"{row['payload_Bps'] * 8e-9:.3f}"]
        cells += [str(sum(result["wrong"] for result in results.values()))]
        yield "| " + " | ".join(cells) + " |"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"
