"""The rules of schedules, applied to one transfer at a time. This slow and simple proof tests
`prove`.

A contribution is a pair (chunk, set of ranks). A dictionary holds the contributions by place.
"""

from __future__ import annotations

from itertools import groupby, pairwise

from unisono.schedule import Schedule, Transfer

Place = tuple[int, int]
Value = tuple[int, frozenset[int]]


def is_right(schedule: Schedule) -> bool:
    """Returns True if the schedule keeps all rules and performs its collective."""
    transfers = tuple(schedule.transfers)
    rounds = [0, *(t.round for t in transfers)]
    if schedule.scratch < 0 or any(a > b for a, b in pairwise(rounds)):
        return False
    if not all(_exists(schedule, t) for t in transfers):
        return False
    collective = schedule.collective
    state: dict[Place, Value] = {
        (rank, chunk): (chunk, frozenset({rank}))
        for rank in range(collective.ranks)
        for chunk in collective.initial(rank)
    }
    for _, group in groupby(transfers, key=lambda t: t.round):
        written = _round(state, list(group))
        if written is None:
            return False
        state.update(written)
    return all(
        state.get((rank, chunk)) == (chunk, contributors)
        for rank in range(collective.ranks)
        for chunk, contributors in collective.expected(rank).items()
    )


def _exists(schedule: Schedule, t: Transfer) -> bool:
    ranks, last = range(schedule.collective.ranks), schedule.num_locations - t.count
    places = 0 <= t.src_chunk <= last and 0 <= t.dst_chunk <= last
    return t.src in ranks and t.dst in ranks and t.count > 0 and t.channel >= 0 and places


def _round(state: dict[Place, Value], transfers: list[Transfer]) -> dict[Place, Value] | None:
    """Returns the writes of a round, or None if the round breaks a rule."""
    moves = [
        ((t.src, t.src_chunk + i), (t.dst, t.dst_chunk + i), t.reduce)
        for t in transfers
        for i in range(t.count)
    ]
    targets = {dst for _, dst, _ in moves}
    written: dict[Place, Value] = {}
    for src, dst, reduce in moves:
        if src not in state or (src[0] == dst[0] and src in targets):
            return None
        if not reduce:
            if sum(other == dst for _, other, _ in moves) > 1:
                return None
            written[dst] = state[src]
            continue
        own = written.get(dst, state.get(dst))
        chunk, ranks = state[src]
        if own is None or own[0] != chunk or own[1] & ranks:
            return None
        written[dst] = chunk, own[1] | ranks
    return written
