"""Describes the transfers of a round in few words, with ranges, groups of ranks, and patterns over
all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unisono.schedule import Schedule, Transfer
from unisono.show.cells import label
from unisono.types import Op

FEW = 8
"""Largest number of hops that are listed although one pattern describes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactLine:
    """Transfers that carry the same chunks: `hops` such as `0→1`, and the chunks."""

    hops: str
    chunks: str

    def __str__(self) -> str:
        return f"{self.hops}: {self.chunks}"


def entries(schedule: Schedule, transfers: Sequence[Transfer]) -> list[CompactLine]:
    """Returns all transfers of a round, grouped by their chunks. `+` marks a reduction.

    >>> from unisono.algorithms import build
    >>> ring, tree = build("all_reduce", "ring", ranks=3), build("broadcast", "direct", ranks=5)
    >>> [str(entry) for entry in entries(ring, ring.transfers[:3])]
    ['0→1: 2+', '1→2: 0+', '2→0: 1+']
    >>> [str(entry) for entry in entries(tree, tree.transfers)]
    ['0→all: 0']
    """
    ranks = schedule.collective.ranks
    carried = chunks_by_link(schedule, transfers)
    by_source: dict[tuple[int, str], list[int]] = defaultdict(list)
    by_destination: dict[tuple[int, str], list[int]] = defaultdict(list)
    for (src, dst), chunks in carried.items():
        by_source[src, chunks].append(dst)
        by_destination[dst, chunks].append(src)
    if len(by_destination) < min(len(carried), len(by_source)):
        found = [(f"{_peers(srcs, ranks)}→{dst}", c) for (dst, c), srcs in by_destination.items()]
    elif len(by_source) < len(carried):
        found = [(f"{src}→{_peers(dsts, ranks)}", c) for (src, c), dsts in by_source.items()]
    else:
        found = _exchanges(carried)
    by_chunks: dict[str, list[str]] = defaultdict(list)
    for hops, chunks in found:
        by_chunks[chunks].append(hops)
    return [CompactLine(hops=" ".join(hops), chunks=chunks) for chunks, hops in by_chunks.items()]


def pattern(schedule: Schedule, transfers: Sequence[Transfer]) -> CompactLine | None:
    """Returns one line that describes the transfers of every rank r, or None if they have no common
    pattern.

    >>> from unisono.algorithms import build
    >>> ring = build("all_reduce", "ring", ranks=64)
    >>> str(pattern(ring, ring.transfers[:64]))
    'r→r+1: r-1+'
    """
    ranks = schedule.collective.ranks
    first = transfers[0]
    links = {(t.src, t.dst) for t in transfers}
    uniform = all(
        (t.src_chunk, t.count, t.reduce) == (t.dst_chunk, first.count, first.reduce)
        for t in transfers
    )
    if ranks < 3 or not uniform or len(links) < len(transfers):
        return None
    mark = "+" if first.reduce else ""
    if len(links) == ranks * (ranks - 1):
        return _pattern_of_all(schedule, transfers, mark)
    chunks = _pattern_of_chunks(schedule, transfers)
    if chunks is None or sorted(t.src for t in transfers) != list(range(ranks)):
        return None
    hop = _offset((t.dst - t.src for t in transfers), ranks)
    flips = {t.src ^ t.dst for t in transfers}
    if hop is None and len(flips) > 1:
        return None
    return CompactLine(hops=f"r→{hop or f'r xor {flips.pop()}'}", chunks=chunks + mark)


def lines(schedule: Schedule, transfers: Sequence[Transfer], *, limit: int | None) -> list[str]:
    """Returns the text of a round, with at most about `limit` entries. With None, returns all
    entries and does not use patterns."""
    every = entries(schedule, transfers)
    if limit is None or sum(len(entry.hops.split()) for entry in every) <= FEW:
        return [str(entry) for entry in every]
    found = pattern(schedule, transfers)
    if found is not None:
        return [f"{found}  for every rank r, mod {schedule.collective.ranks}"]
    shown = [str(entry) for entry in every[:limit]]
    return [*shown, f"and {len(every) - limit} more"] if len(every) > limit else shown


def ranges(numbers: Iterable[int]) -> str:
    """Returns numbers as text with ranges.

    >>> ranges([0, 2, 3, 4, 7, 8])
    '0,2-4,7,8'
    """
    runs: list[list[int]] = []
    for value in sorted(numbers):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    texts = []
    for start, end in runs:
        separator = "-" if end > start + 1 else ","
        texts.append(str(start) if start == end else f"{start}{separator}{end}")
    return ",".join(texts)


def _peers(found: list[int], ranks: int) -> str:
    """Returns the numbers of peers as text: `all` if the peers are all other ranks, at least two,
    else ranges of numbers."""
    return "all" if len(found) == ranks - 1 > 1 else ranges(found)


def chunks_by_link(schedule: Schedule, transfers: Sequence[Transfer]) -> dict[tuple[int, int], str]:
    """Returns the chunks that each (source, destination) carries, as text."""
    spans: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for t in transfers:
        spans[t.src, t.dst].append(t)
    return {link: _span_text(schedule, found) for link, found in spans.items()}


def _span_text(schedule: Schedule, transfers: list[Transfer]) -> str:
    """Returns the chunk ranges of one link; adjacent ranges are merged."""
    joined: list[tuple[int, int, int, bool]] = []
    for t in sorted(transfers, key=lambda t: (t.reduce, t.src_chunk)):
        if joined:
            src, dst, count, reduce = joined[-1]
            if (src + count, dst + count, reduce) == (t.src_chunk, t.dst_chunk, t.reduce):
                joined[-1] = src, dst, count + t.count, reduce
                continue
        joined.append((t.src_chunk, t.dst_chunk, t.count, t.reduce))
    texts = []
    for src, dst, count, reduce in joined:
        text = _range_text(schedule, src, count)
        if dst != src:
            text += f"→{_range_text(schedule, dst, count)}"
        texts.append(text + "+" * reduce)
    return ",".join(texts)


def _range_text(schedule: Schedule, start: int, count: int) -> str:
    first = label(schedule, start)
    return first if count == 1 else f"{first}-{label(schedule, start + count - 1)}"


def _exchanges(carried: dict[tuple[int, int], str]) -> list[tuple[str, str]]:
    """Merges both directions of a link into one hop `a↔b` if they carry the same chunks."""
    found = []
    for (src, dst), chunks in carried.items():
        both = src != dst and carried.get((dst, src)) == chunks
        if not both:
            found.append((f"{src}→{dst}", chunks))
        elif src < dst:
            found.append((f"{src}↔{dst}", chunks))
    return found


def _pattern_of_all(
    schedule: Schedule, transfers: Sequence[Transfer], mark: str
) -> CompactLine | None:
    """Returns the pattern of a round in which every rank sends to every other rank: its own chunk,
    or the chunk of the receiver."""
    collective = schedule.collective
    if any(t.src == t.dst or t.count > 1 for t in transfers):
        return None
    if collective.op is Op.ALL_TO_ALL and collective.parts == 1:
        own = all(divmod(t.src_chunk, collective.ranks) == (t.src, t.dst) for t in transfers)
        return CompactLine(hops="r→s", chunks="r:s, all s") if own else None
    if {t.src_chunk for t in transfers} == {0}:
        return CompactLine(hops="r→all", chunks=f"0{mark}")
    if collective.num_chunks != collective.ranks:
        return None
    by_source = _offset((t.src_chunk - t.src for t in transfers), collective.ranks)
    by_destination = _offset((t.src_chunk - t.dst for t in transfers), collective.ranks)
    if by_source is not None:
        return CompactLine(hops="r→all", chunks=by_source + mark)
    return CompactLine(hops="all→r", chunks=by_destination + mark) if by_destination else None


def _pattern_of_chunks(schedule: Schedule, transfers: Sequence[Transfer]) -> str | None:
    collective = schedule.collective
    first = transfers[0]
    starts = {t.src_chunk for t in transfers}
    if len(starts) == 1:
        return _range_text(schedule, first.src_chunk, first.count)
    if first.count != 1 or collective.num_chunks % collective.ranks or schedule.scratch:
        return None
    if collective.op is Op.ALL_TO_ALL and collective.parts == 1:
        ends = [divmod(t.src_chunk, collective.ranks) for t in transfers]
        parts = [
            _offset(
                (end[i] - t.src for end, t in zip(ends, transfers, strict=True)), collective.ranks
            )
            for i in (0, 1)
        ]
        return None if None in parts else f"{parts[0]}:{parts[1]}"
    if collective.num_chunks == collective.ranks:
        return _offset((t.src_chunk - t.src for t in transfers), collective.ranks)
    return None


def _offset(differences: Iterable[int], modulus: int) -> str | None:
    """Returns `r` if all differences are 0 modulo `modulus`, `r+k` if all are k, `r-k` if all are
    -k, else None."""
    found = {difference % modulus for difference in differences}
    if len(found) != 1:
        return None
    value = found.pop()
    if value > modulus // 2:
        value -= modulus
    return f"r{value:+d}" if value else "r"
