"""Tests that compact text describes a schedule exactly: the text is parsed and compared with the
schedule.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases_in_turn import turn
from unisono.algorithms import build, names
from unisono.schedule import Schedule, Transfer
from unisono.show.transfer_text import entries, lines, pattern
from unisono.types import Op

Sent = set[tuple[int, int, int, int, bool]]
"""(source, destination, source chunk, destination chunk, reduce)"""

EVERY = [(op, name) for op in Op for name in names(op)]


def numbers(text: str, others: set[int]) -> set[int]:
    found: set[int] = set()
    for run in text.split(","):
        first, _, last = run.partition("-")
        found |= others if run == "all" else set(range(int(first), int(last or first) + 1))
    return found


def location_of(name: str, schedule: Schedule) -> int:
    """Returns the location with a label such as `2`, `s1`, `owner.part` or
    `source:destination.part`.
    """
    collective = schedule.collective
    if name.startswith("s"):
        return collective.num_chunks + int(name[1:])
    piece, dot, part = name.partition(".")
    if ":" in piece:
        src, _, dst = piece.partition(":")
        piece = str(int(src) * collective.ranks + int(dst))
    return int(piece) * collective.parts + int(part) if dot else int(piece)


def locations_of(text: str, schedule: Schedule) -> range:
    first, _, last = text.partition("-")
    return range(location_of(first, schedule), location_of(last or first, schedule) + 1)


def read(text: str, schedule: Schedule) -> Sent:
    """Returns the transfers that an entry of the text describes."""
    hops, _, carried = text.partition(": ")
    sent: Sent = set()
    everyone = set(range(schedule.collective.ranks))
    for hop in hops.split(" "):
        left, arrow, right = re.fullmatch(r"(\S+)(→|↔)(\S+)", hop).groups()  # type: ignore[union-attr]
        srcs = everyone - {int(right)} if left == "all" else numbers(left, set())
        links = {(src, dst) for src in srcs for dst in numbers(right, everyone - {src})}
        if arrow == "↔":
            links |= {(dst, src) for src, dst in links}
        for part in carried.split(","):
            source, _, destination = part.rstrip("+").partition("→")
            places = locations_of(source, schedule), locations_of(destination or source, schedule)
            for chunk, to in zip(*places, strict=True):
                sent |= {(src, dst, chunk, to, part.endswith("+")) for src, dst in links}
    return sent


def actual_transfers(transfers: Sequence[Transfer]) -> Sent:
    return {
        (t.src, t.dst, t.src_chunk + i, t.dst_chunk + i, t.reduce)
        for t in transfers
        for i in range(t.count)
    }


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_entries_describe_all_transfers_exactly(data: st.DataObject) -> None:
    op, name = data.draw(st.sampled_from(EVERY))
    ranks = data.draw(st.integers(2, 12))
    schedule = build(op, name, ranks=ranks, root=data.draw(st.integers(0, ranks - 1)))
    for _, transfers in schedule.rounds():
        described = [read(str(entry), schedule) for entry in entries(schedule, transfers)]
        assert set().union(*described) == actual_transfers(transfers)
        assert sum(map(len, described)) == len(actual_transfers(transfers)), "described twice"


def value_at(text: str, rank: int, ranks: int) -> int:
    """Returns the value of an expression such as `r`, `r+3`, `r xor 2` or `5` for one rank."""
    if "xor" in text:
        return rank ^ int(text.rsplit(maxsplit=1)[-1])
    return (rank + int(text[1:] or 0)) % ranks if text.startswith("r") else int(text)


def transfers_of_pattern(schedule: Schedule, hops: str, chunks: str) -> Sent:
    n, reduce = schedule.collective.ranks, chunks.endswith("+")
    chunks = chunks.rstrip("+")
    described: list[tuple[int, int, range]] = []
    left, right = hops.split("→")
    for rank in range(n):
        everyone = [s for s in range(n) if s != rank]
        if chunks == "r:s, all s":
            described += [(rank, s, one(rank * n + s)) for s in everyone]
        elif left == "all":
            described += [(s, rank, one(value_at(chunks, rank, n))) for s in everyone]
        elif right == "all":
            described += [(rank, s, one(value_at(chunks, rank, n))) for s in everyone]
        elif "r" not in chunks:
            described.append((rank, value_at(right, rank, n), locations_of(chunks, schedule)))
        elif ":" in chunks:
            owner, receiver = (value_at(end, rank, n) for end in chunks.split(":"))
            described.append((rank, value_at(right, rank, n), one(owner * n + receiver)))
        else:
            described.append((rank, value_at(right, rank, n), one(value_at(chunks, rank, n))))
    return {(src, dst, chunk, chunk, reduce) for src, dst, found in described for chunk in found}


def one(chunk: int) -> range:
    return range(chunk, chunk + 1)


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_a_pattern_describes_all_transfers_exactly(op: Op, name: str) -> None:
    for ranks in (3, 4, 7, 16):
        schedule = build(op, name, ranks=ranks)
        for number, transfers in schedule.rounds():
            found = pattern(schedule, transfers)
            if found is not None:
                with turn(ranks=ranks, round=number):
                    assert transfers_of_pattern(
                        schedule, found.hops, found.chunks
                    ) == actual_transfers(transfers)


@pytest.mark.parametrize(
    ("op", "name", "text"),
    [
        ("all_reduce", "ring", "r→r+1: r-1+"),
        ("all_reduce", "direct", "all→r: r+"),
        ("all_reduce", "one_shot", "r→all: 0+"),
        ("all_to_all", "direct", "r→s: r:s, all s"),
        ("all_to_all", "pairwise", "r→r+1: r:r+1"),
        ("all_gather", "recursive_doubling", "r→r xor 1: r"),
    ],
)
def test_patterns_of_builtin_algorithms(op: str, name: str, text: str) -> None:
    schedule = build(op, name, ranks=16)
    _, transfers = next(schedule.rounds())
    assert lines(schedule, transfers, limit=4) == [f"{text}  for every rank r, mod 16"]


def test_long_rounds_are_cut_with_a_count() -> None:
    schedule = build("all_to_all", "direct", ranks=9)
    first = schedule.transfers[:40]  # an incomplete round, which has no pattern
    assert lines(schedule, first, limit=10)[-1] == "and 30 more"
    assert len(lines(schedule, first, limit=None)) == 40
