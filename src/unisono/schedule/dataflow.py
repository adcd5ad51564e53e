"""The values that a right schedule makes: what each is made of, where, and when, as columns.

This is what `lower` works on. The proof that the schedule is right comes first (`proof.py`), so
nothing is looked at twice here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.chunk_moves import Moves, heads
from unisono.schedule.collective import Numbers
from unisono.schedule.proof import prove_moves
from unisono.schedule.schedule import Schedule

_COUNT, _TOP, _DEPTH, _OUT_OF_ORDER = range(4)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataflow:
    """The values that matter: those some output is made of.

    A value is what one place holds between two writes. Values are numbers: first the `inputs`
    that are there before, in the order of `places.initial`, then each move's, in the order of the
    schedule; where moves of a round meet in one place, the value has the number of the first.
    Numbers that are left over so, and of values that do not matter, are not in `made`.

    `place`, `rank`, `location`, `chunk` and `round` have one entry for each number; rounds count
    from 0 without gaps, and are -1 for the inputs. `made` are the values that are written,
    ascending. Value `made[i]` is made of `operands[first[i] : first[i + 1]]`, in the order of the
    fold; a copy has one operand. `outputs` are the final values in the order of `places.wanted`.

    `complete` says of each number whether the value has the contributions of all ranks, which is
    only told where something is reduced. `reduce_depth` is the largest number of nested reductions
    in any output. `in_rank_order` says that each output is the fold of its contributions from left
    to right in the order of their ranks, ((x0 + x1) + x2) + ..., or a copy of such a fold: made at
    once, or in steps of which each goes on where the one before ended.
    """

    moves: Moves
    inputs: int
    place: Numbers
    rank: Numbers
    location: Numbers
    chunk: Numbers
    round: Numbers
    made: Numbers
    first: Numbers
    operands: Numbers
    outputs: Numbers
    complete: NDArray[np.bool_]
    reduce_depth: int
    in_rank_order: bool


def trace(schedule: Schedule) -> Dataflow:
    """Replay the schedule; raise `ScheduleError`, naming rank, chunk and round, if it is wrong.

    Raises `UnsupportedError` for what is too large to be proved.

    >>> from unisono import algorithms
    >>> flow = trace(algorithms.build("all_reduce", "one_shot", ranks=3))
    >>> flow.made.tolist(), flow.first.tolist(), flow.operands.reshape(3, 3).tolist()
    ([3, 5, 7], [0, 3, 6, 9], [[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    """
    moves = Moves.of(schedule)
    prove_moves(moves)
    places, collective = moves.places, schedule.collective
    inputs = len(places.initial)
    held = np.zeros(len(places), np.int64)
    start = places.number(places.initial)
    held[start] = np.arange(inputs)
    chunk = np.empty(inputs + len(moves.src), np.int64)
    chunk[:inputs] = places.initial % max(1, schedule.num_locations)
    round_ = np.full(len(chunk), -1)
    made, read, own = _replay(moves, held, chunk, round_, inputs)
    outputs = held[places.number(places.wanted)]
    place = np.concatenate((start, moves.dst))
    key = place if places.keys is None else places.keys[place]
    rank, location = np.divmod(key, max(1, schedule.num_locations))
    target, operand = _fold_order(moves, made, read, own, rank, inputs)
    live = _live(moves, target, operand, outputs)
    if not live[target].all():
        target, operand = target[live[target]], operand[live[target]]
    edges = heads(target)
    first = np.concatenate((edges, [len(target)]))
    history = _histories(target, operand, first, round_, rank, inputs)
    return Dataflow(
        moves=moves,
        inputs=inputs,
        place=place,
        rank=rank,
        location=location,
        chunk=chunk,
        round=round_,
        made=target[edges],
        first=first,
        operands=operand,
        outputs=outputs,
        complete=history[:, _COUNT] == collective.ranks,
        reduce_depth=int(history[outputs, _DEPTH].max(initial=0)),
        in_rank_order=not history[outputs, _OUT_OF_ORDER].any(),
    )


def folds_in_rank_order(schedule: Schedule) -> bool:
    """Whether every result is one fold of the contributions in the order of ranks, from left to
    right. Of such schedules all give the same bits, element by element, whatever the arithmetic.

    All schedules do for which nothing is reduced. Raises `ScheduleError` when the schedule is
    wrong.

    >>> from unisono import algorithms
    >>> folds_in_rank_order(algorithms.build("all_reduce", "direct", ranks=4))
    True
    >>> folds_in_rank_order(algorithms.build("all_reduce", "ring", ranks=4))
    False
    """
    return trace(schedule).in_rank_order


def _replay(
    moves: Moves, held: Numbers, chunk: Numbers, round_: Numbers, inputs: int
) -> tuple[Numbers, Numbers, Numbers]:
    """For each move the value it makes, the one it reads, and the one it finds at its goal.

    `held` tells what each place holds, first before and then after all; `chunk` and `round_` are
    filled in for the values that are made.
    """
    numbers = np.arange(inputs, len(chunk))
    made, read, own = np.empty_like(numbers), np.empty_like(numbers), np.empty_like(numbers)
    for index, (_, where) in enumerate(moves.rounds):
        dst, number = moves.dst[where], numbers[where]
        source = held[moves.src[where]]
        own[where] = held[dst]
        held[dst[::-1]] = number[::-1]  # where several meet, the first of them stays
        made[where] = held[dst]
        read[where] = source
        chunk[number] = chunk[source]
        round_[number] = index
    return made, read, own


def _fold_order(
    moves: Moves, made: Numbers, read: Numbers, own: Numbers, rank: Numbers, inputs: int
) -> tuple[Numbers, Numbers]:
    """Pairs of a value and an operand of it, by value, and for each in the order of the fold: by
    the operands' ranks, what a reduction finds at its goal before others of that rank."""
    if not moves.reduce.any():
        return made, read
    into = np.flatnonzero(moves.reduce & (made == np.arange(inputs, len(rank))))
    target = np.concatenate((made[into], made))
    operand = np.concatenate((own[into], read))
    order = np.argsort(target * (int(rank.max()) + 1) + rank[operand], kind="stable")
    return target[order], operand[order]


def _live(moves: Moves, target: Numbers, operand: Numbers, outputs: Numbers) -> NDArray[np.bool_]:
    """Which values some output is made of."""
    inputs = len(moves.places.initial)
    live = np.zeros(inputs + len(moves.src), np.bool_)
    live[operand] = live[outputs] = True
    if live[target].all():
        return live  # each is an output or goes into another, and so on until an output
    live[:] = False
    live[outputs] = True
    stops = target.searchsorted([inputs + where.stop for _, where in moves.rounds])
    for start, stop in reversed(list(pairwise([0, *stops.tolist()]))):
        live[operand[start:stop][live[target[start:stop]]]] = True
    return live


def _histories(
    target: Numbers, operand: Numbers, first: Numbers, round_: Numbers, rank: Numbers, inputs: int
) -> NDArray[np.int32]:
    """Of each value in the columns `_COUNT`, ...: how many contributions it has, the highest rank
    of any, how deep its reductions are nested, whether it is other than a fold in rank order.

    Such a fold goes on with single contributions, each of a rank above all before it.
    """
    table = np.zeros((len(rank), 4), np.int32)
    table[:inputs, _COUNT] = 1
    table[:inputs, _TOP] = rank[:inputs]
    made = target[first[:-1]]
    if len(made) == len(target):
        return table  # nothing is reduced
    for start, stop in pairwise([*heads(round_[made]).tolist(), len(made)]):
        some = slice(first[start], first[stop])
        rows = table[operand[some]]
        if len(rows) > stop - start:
            groups = first[start:stop] - first[start]
            follows = (rows[1:, _COUNT] == 1) & (rows[1:, _TOP] > rows[:-1, _TOP])
            into = target[some]
            rows[1:, _OUT_OF_ORDER] |= ~follows & (into[1:] == into[:-1])
            counts = np.add.reduceat(rows[:, _COUNT], groups)
            rows = np.maximum.reduceat(rows, groups)
            rows[:, _COUNT] = counts
            rows[:, _DEPTH] += first[start + 1 : stop + 1] - first[start:stop] > 1
        table[made[start:stop]] = rows
    return table
