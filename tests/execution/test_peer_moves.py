"""Moves between memories that one rank can access, compared with the operation's definition."""

from __future__ import annotations

import random

import numpy as np
import pytest

from unisono.algorithms import build, names
from unisono.errors import UnsupportedError
from unisono.execution import moves_of
from unisono.types import Op

OPS = (
    Op.ALL_REDUCE, Op.REDUCE, Op.BROADCAST, Op.ALL_GATHER, Op.GATHER, Op.REDUCE_SCATTER, Op.SCATTER,
    Op.ALL_TO_ALL,
)  # fmt: skip


def performers_of(ranks):
    return [[0] * ranks, list(range(ranks)), [rank // 2 * 2 for rank in range(ranks)]]


def moves(op, name, ranks, performers):
    """Returns the collective, and the moves of an algorithm's schedule."""
    root = {"root": ranks - 1} if op.rooted else {}
    schedule = build(op, name, ranks=ranks, **root)
    return schedule.collective, moves_of(schedule, performers)


def serves(op, name, ranks):
    try:
        moves(op, name, ranks, [0] * ranks)
    except UnsupportedError:
        return False
    return True


CASES = [
    (op, name, ranks, in_place)
    for op in OPS
    for name in names(op)
    for ranks in (2, 3, 4)
    # an all_to_all in place reads pieces that other moves write
    for in_place in ((False,) if op is Op.ALL_TO_ALL else (False, True))
    if serves(op, name, ranks)
]


class Memories:
    """The inputs and outputs of all ranks, with one number for each part of a piece."""

    def __init__(self, collective, in_place):
        self.collective, self.in_place = collective, in_place
        self.values = {}
        for rank in range(collective.ranks):
            for piece in range(collective.input_pieces(rank)):
                for part in range(collective.parts):
                    chunk = self.chunk(rank, piece, part)
                    if chunk is not None and collective.holds(rank, chunk):
                        self.values[self.key(rank, False, piece, part)] = {rank * 1000 + chunk}

    def chunk(self, rank, piece, part):
        c = self.collective
        found = [x for x in range(c.num_chunks) if c.input_ref(rank, x) == (piece, part)]
        return found[0] if found else None

    def key(self, rank, is_output, piece, part):
        if self.in_place and not is_output:
            shared = self.collective.in_place_output(rank, piece)
            if shared is not None:
                return rank, True, shared, part
        return rank, is_output, piece, part

    def keys(self, place):
        return [
            self.key(place.rank, place.is_output, place.piece, place.part + k)
            for k in range(place.parts)
        ]

    def run(self, move):
        columns = zip(*(self.keys(each) for each in move.sources), strict=True)
        results = []
        for column in columns:
            found = [self.values[key] for key in column]
            assert sum(map(len, found)) == len(set().union(*found)), "reduced twice"
            results.append(set().union(*found))
        for target in move.targets:
            for key, value in zip(self.keys(target), results, strict=True):
                self.values[key] = value


@pytest.mark.parametrize(("op", "name", "ranks", "in_place"), CASES)
def test_moves_perform_the_operation(op, name, ranks, in_place):
    for performers in performers_of(ranks):
        collective, phases = moves(op, name, ranks, performers)
        memories = Memories(collective, in_place)
        for phase in phases:
            by_performer = [
                [each for each in phase if each.performer == rank] for rank in range(ranks)
            ]
            while any(by_performer):  # performers go on in any order
                queue = random.choice([each for each in by_performer if each])
                memories.run(queue.pop(0))
        for rank in range(ranks):
            for chunk, contributors in collective.expected(rank).items():
                piece, part = collective.output_ref(rank, chunk)
                expected = {source * 1000 + chunk for source in contributors}
                assert memories.values[rank, True, piece, part] == expected


def test_one_performer_needs_one_pass():
    _, ((one,),) = moves(Op.ALL_REDUCE, "direct", 4, [0] * 4)
    assert (
        [each.rank for each in one.sources] == [each.rank for each in one.targets] == [0, 1, 2, 3]
    )
    assert one.sources[0].parts == 4
    assert np.prod([one.targets[0].part, one.targets[0].piece]) == 0


def test_performers_of_several_devices_take_phases():
    _, phases = moves(Op.ALL_REDUCE, "direct", 4, [0, 1, 2, 3])
    assert [len(phase) for phase in phases] == [4, 12]


@pytest.mark.parametrize(
    ("op", "name", "text"),
    [
        (Op.ALL_REDUCE, "one_shot", "in the round in which rank"),
        (Op.REDUCE_SCATTER, "ring", "keeps chunk"),
    ],
)
def test_other_schedules_are_refused(op, name, text):
    with pytest.raises(UnsupportedError, match=text):
        moves_of(build(op, name, ranks=4), [0] * 4)
