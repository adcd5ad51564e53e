"""Order of the steps of each rank, and assignment of values to staging slots.

A value gets a slot if and only if another rank reads the value. All its readers share the slot. In
each round, a rank first fills slots with the inputs that other ranks need, and posts. Then the rank
writes the values of the round, and posts again if these values fill slots. At the end, the rank
copies the inputs that are results to the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.schedule.chunk_moves import run_starts
from unisono.schedule.collective import Numbers
from unisono.schedule.dataflow import Dataflow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staging:
    """Steps, slots and posts of all ranks.

    Operand i of the data flow (see `Dataflow.operands`) is an operand of value `target[i]`.
    `remote[i]` is true if another rank reads the operand.

    `steps` are the values that the ranks process, in order. The steps of rank r are `starts[r] :
    starts[r + 1]`. A step writes its value, unless the value is an input. For an input, `fills` is
    true if the step copies the input to its slot, and false if the step copies the input to the
    output. `closing` is the number of the post after each step, or 0 without a post. `round` is the
    round of each step.

    For each value that another rank reads, `slot` is the slot of the value, `post` is the post that
    publishes the value, and `posted` is the round of this post. For each rank, `num_slots` is the
    number of its slots, and `posts` is the number of its posts.
    """

    target: Numbers
    remote: NDArray[np.bool_]
    steps: Numbers
    starts: Numbers
    fills: NDArray[np.bool_]
    closing: Numbers
    round: Numbers
    slot: Numbers
    post: Numbers
    posted: Numbers
    num_slots: Numbers
    posts: Numbers

    def step_of(self) -> Numbers:
        """Returns the number of the step that processes each value."""
        found = np.empty_like(self.slot)
        found[self.steps] = np.arange(len(self.steps))
        return found


def stage(flow: Dataflow) -> Staging:
    """Orders all steps, and numbers the slots and posts."""
    ranks, numbers = flow.moves.places.schedule.collective.ranks, len(flow.rank)
    target = flow.made.repeat(flow.first[1:] - flow.first[:-1])
    remote = flow.rank[flow.operands] != flow.rank[target]
    steps, position, copied_out = _steps(flow, target, remote)
    rank = flow.rank[steps]
    starts = rank.searchsorted(np.arange(ranks + 1))

    staged = np.zeros(numbers, np.bool_)
    staged[flow.operands[remote]] = True
    fills = staged[steps] & ~copied_out
    filling = np.flatnonzero(fills)
    before = filling.searchsorted(starts)  # total number of slots of all lower ranks
    slot, post, posted = (np.full(numbers, -1), *np.zeros((2, numbers), np.int64))
    rounds = len(flow.moves.rounds)
    round_ = np.minimum(position // 2 % (rounds + 1), max(rounds - 1, 0))
    slot[steps[filling]] = np.arange(len(filling)) - before[rank[filling]]

    closes = _closing_steps(position, filling)
    posts = np.bincount(rank[closes], minlength=ranks)
    number = np.arange(1, len(closes) + 1) - (posts.cumsum() - posts)[rank[closes]]
    closing = np.zeros(len(steps), np.int64)
    closing[closes] = number
    post[steps[filling]] = number[closes.searchsorted(filling)]
    posted[steps[filling]] = round_[filling]
    return Staging(
        target=target,
        remote=remote,
        steps=steps,
        starts=starts,
        fills=fills,
        closing=closing,
        round=round_,
        slot=slot,
        post=post,
        posted=posted,
        num_slots=before[1:] - before[:-1],
        posts=posts,
    )


def _closing_steps(position: Numbers, filling: Numbers) -> Numbers:
    """Returns the steps that end with a post. If any step of a position (see `_steps`) fills a
    slot, the last step of this position ends with a post.
    """
    ends = np.concatenate((run_starts(position)[1:], [len(position)]))
    full = ends.searchsorted(filling, "right")  # the position of each step that fills a slot
    found: Numbers = ends[full[run_starts(full)]] - 1
    return found


def _steps(
    flow: Dataflow, target: Numbers, remote: NDArray[np.bool_]
) -> tuple[Numbers, Numbers, NDArray[np.bool_]]:
    """Returns the values of all steps, the position of each step, and a mask of the inputs that are
    copied to the output.

    Steps with equal position run one after another, without a post between them. Positions are in
    ascending order.
    """
    ranks, rounds = flow.moves.places.schedule.collective.ranks, len(flow.moves.rounds) + 1
    position = flow.rank[flow.made] * rounds + flow.round[flow.made]
    # Each rank starts with the operands of the next rank, so that not all ranks read from the
    # same source at the same time.
    source = flow.rank[flow.operands[flow.first[:-1]]]
    order = np.argsort(
        position * ranks + (source - flow.rank[flow.made] - 1) % ranks, kind="stable"
    )
    made, position = flow.made[order], position[order]
    sent, into = _sent(flow, target, remote, made, position)
    copied_out = flow.outputs[flow.outputs < flow.inputs]
    value = np.concatenate((sent, made, copied_out))
    positions = np.concatenate(
        (
            2 * (flow.rank[sent] * rounds + flow.round[into]),
            2 * position + 1,
            2 * (flow.rank[copied_out] * rounds + rounds - 1),
        )
    )
    order = positions.argsort(kind="stable")
    return value[order], positions[order], order >= len(value) - len(copied_out)


def _sent(
    flow: Dataflow, target: Numbers, remote: NDArray[np.bool_], made: Numbers, position: Numbers
) -> tuple[Numbers, Numbers]:
    """Returns the inputs that other ranks read, each with the first value that uses the input.

    If several values use an input in the same round, and no earlier value does, the result contains
    the value of the rank whose last value of this round has the highest number.
    """
    runs = run_starts(position)
    latest = np.zeros(len(flow.rank), np.int64)
    sizes = np.concatenate((runs[1:], [len(made)])) - runs
    latest[made] = np.repeat(np.maximum.reduceat(made, runs), sizes)
    early = np.flatnonzero(remote & (flow.operands < flow.inputs))
    into = target[early]
    order = np.argsort(flow.round[into] * len(flow.rank) - latest[into], kind="stable")
    operand, into = flow.operands[early[order]], into[order]
    index = np.arange(len(operand))
    first = np.empty(flow.inputs, np.int64)
    first[operand[::-1]] = index[::-1]
    new = first[operand] == index
    return operand[new], into[new]
