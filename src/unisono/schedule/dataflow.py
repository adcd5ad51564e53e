"""Values of a correct schedule, stored as columns: the operands, place and round of each value.

`lower` reads this form. `proof.py` proves the schedule correct first, so this module repeats no
check.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.chunk_moves import Moves, run_starts
from unisono.schedule.collective import Numbers
from unisono.schedule.proof import prove_moves
from unisono.schedule.schedule import Schedule

_COUNT, _TOP, _DEPTH, _OUT_OF_ORDER = range(4)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dataflow:
    """Values of a schedule that contribute to some output.

    A value is the content of one place between two writes. Each value has a number. The `inputs`
    that exist before the call come first, in the order of `places.initial`. The values of moves
    follow, in the order of the schedule. If several moves of a round write one place, the value has
    the number of the first move. `made` omits the other numbers, and the numbers of values that
    contribute to no output.

    - `place`, `rank`, `location`, `chunk` and `round` have one entry for each number. Rounds count
      from 0 without gaps; inputs have round -1.
    - `made` are the written values, in ascending order.
    - Value `made[i]` is the fold of `operands[first[i] : first[i + 1]]`, in this order. A copy has
      one operand.
    - `outputs` are the final values, in the order of `places.wanted`.
    - `complete` marks values that contain the contributions of all ranks. The mark is valid only
      for operations that reduce.
    - `reduce_depth` is the largest number of nested reductions in any output.
    - `in_rank_order` is true if each output is a left-to-right fold of its contributions in rank
      order, ((x0 + x1) + x2) + ..., or a copy of such a fold. The fold may take several steps if
      each step continues the result of the previous step.
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
    """Replays the schedule and returns its values.

    Raises `ScheduleError` with the rank, chunk and round for a wrong schedule, and
    `UnsupportedError` for a schedule that is too large for the proof.

    >>> from unisono import algorithms
    >>> flow = trace(algorithms.build("all_reduce", "one_shot", ranks=3))
    >>> flow.made.tolist(), flow.first.tolist(), flow.operands.reshape(3, 3).tolist()
    ([3, 5, 7], [0, 3, 6, 9], [[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    """
    moves = Moves.of(schedule)
    prove_moves(moves)
    places, inputs = moves.places, len(moves.places.initial)
    chunk = np.empty(inputs + len(moves.src), np.int64)
    chunk[:inputs] = places.initial % max(1, schedule.num_locations)
    round_ = np.full(len(chunk), -1)
    outputs, made, read, own = _replay(moves, chunk, round_, inputs)
    place = np.concatenate((places.number(places.initial), moves.dst))
    rank, location = places.located(place)
    target, operand = _fold_order(moves, made, read, own, rank, inputs)
    target, operand = _live_folds(moves, target, operand, outputs)
    first = np.concatenate((run_starts(target), [len(target)]))
    history = _histories(target, operand, first, round_, rank, inputs)
    return Dataflow(
        moves=moves,
        inputs=inputs,
        place=place,
        rank=rank,
        location=location,
        chunk=chunk,
        round=round_,
        made=target[first[:-1]],
        first=first,
        operands=operand,
        outputs=outputs,
        complete=history[:, _COUNT] == schedule.collective.ranks,
        reduce_depth=int(history[outputs, _DEPTH].max(initial=0)),
        in_rank_order=not history[outputs, _OUT_OF_ORDER].any(),
    )


def _live_folds(
    moves: Moves, target: Numbers, operand: Numbers, outputs: Numbers
) -> tuple[Numbers, Numbers]:
    """Returns the targets and operands of the values that contribute to some output."""
    live = _live(moves, target, operand, outputs)
    if live[target].all():
        return target, operand
    return target[live[target]], operand[live[target]]


def folds_in_rank_order(schedule: Schedule) -> bool:
    """Returns true if every result is one left-to-right fold of the contributions in rank order.

    All such schedules give bit-identical results, for any reduction and data type. Schedules
    without reductions always return true. Raises `ScheduleError` for a wrong schedule.

    >>> from unisono import algorithms
    >>> folds_in_rank_order(algorithms.build("all_reduce", "direct", ranks=4))
    True
    >>> folds_in_rank_order(algorithms.build("all_reduce", "ring", ranks=4))
    False
    """
    return trace(schedule).in_rank_order


def _replay(
    moves: Moves, chunk: Numbers, round_: Numbers, inputs: int
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Returns the final values of the wanted places, and three values for each move: the value that
    the move makes, the value that the move reads, and the value that the move overwrites or reduces
    into.

    Fills in `chunk` and `round_` for the written values.
    """
    places = moves.places
    held = np.zeros(len(places), np.int64)
    held[places.number(places.initial)] = np.arange(inputs)
    numbers = np.arange(inputs, len(chunk))
    made, read, own = np.empty_like(numbers), np.empty_like(numbers), np.empty_like(numbers)
    for index, (_, where) in enumerate(moves.rounds):
        dst, number = moves.dst[where], numbers[where]
        source = held[moves.src[where]]
        own[where] = held[dst]
        held[dst[::-1]] = number[::-1]  # if several moves write one place, the first is kept
        made[where] = held[dst]
        read[where] = source
        chunk[number] = chunk[source]
        round_[number] = index
    return held[places.number(places.wanted)], made, read, own


def _fold_order(
    moves: Moves, made: Numbers, read: Numbers, own: Numbers, rank: Numbers, inputs: int
) -> tuple[Numbers, Numbers]:
    """Returns pairs of a value and one of its operands as two arrays. Pairs are ordered by value,
    then in the order of the reduction.

    Operands are ordered by rank. The value that a reduction finds at its destination precedes the
    other operands of that rank.
    """
    if not moves.reduce.any():
        return made, read
    into = np.flatnonzero(moves.reduce & (made == np.arange(inputs, len(rank))))
    target = np.concatenate((made[into], made))
    operand = np.concatenate((own[into], read))
    order = np.argsort(target * (int(rank.max()) + 1) + rank[operand], kind="stable")
    return target[order], operand[order]


def _live(moves: Moves, target: Numbers, operand: Numbers, outputs: Numbers) -> NDArray[np.bool_]:
    """Returns a mask of the values that contribute to some output."""
    inputs = len(moves.places.initial)
    live = np.zeros(inputs + len(moves.src), np.bool_)
    live[operand] = live[outputs] = True
    if live[target].all():
        return live  # each value contributes to some output
    live[:] = False
    live[outputs] = True
    stops = target.searchsorted([inputs + where.stop for _, where in moves.rounds])
    for start, stop in reversed(list(pairwise([0, *stops.tolist()]))):
        live[operand[start:stop][live[target[start:stop]]]] = True
    return live


def _histories(
    target: Numbers, operand: Numbers, first: Numbers, round_: Numbers, rank: Numbers, inputs: int
) -> NDArray[np.int32]:
    """Returns a table with a row for each value.

    The columns `_COUNT`, `_TOP`, `_DEPTH` and `_OUT_OF_ORDER` are: the number of contributions, the
    highest contributing rank, the depth of nested reductions, and a flag for a value that is not a
    fold in rank order. Such a fold adds single contributions in ascending order of their ranks.
    """
    table = np.zeros((len(rank), 4), np.int32)
    table[:inputs, _COUNT] = 1
    table[:inputs, _TOP] = rank[:inputs]
    made = target[first[:-1]]
    if len(made) == len(target):
        return table  # the schedule reduces nothing
    for start, stop in pairwise([*run_starts(round_[made]).tolist(), len(made)]):
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
