"""A schedule as moves between memories that one rank can access directly, without staging.

Ranks on one device, or on devices that can open each other's memory, need no slots: a rank reads
its peers' inputs and writes its peers' outputs. A **move** combines one or more places and writes
the result to one or more places. The **performer** of a move is the rank that issues it to its
device. Moves of different performers are ordered by phases: a performer begins a phase after all
performers have ended the phase before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono.errors import UnsupportedError
from unisono.schedule import Collective, Schedule, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Consecutive parts of a piece in the input or output of a rank."""

    rank: int
    is_output: bool
    piece: int
    part: int
    parts: int = 1

    def joins(self, after: Place) -> bool:
        """Returns True if `after` begins where this place ends."""
        end = replace(self, part=self.part + self.parts, parts=after.parts)
        return end == after


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The combination of the sources, in their order, written to all targets."""

    performer: int
    sources: tuple[Place, ...]
    targets: tuple[Place, ...]

    def joined(self, after: Move) -> Move | None:
        """Returns this move and `after` as one move of longer places; None if impossible."""
        pairs = list(zip(self.sources, after.sources, strict=False))
        pairs += zip(self.targets, after.targets, strict=False)
        shape = len(self.sources), len(self.targets)
        if shape != (len(after.sources), len(after.targets)):
            return None
        if not all(first.joins(second) for first, second in pairs):
            return None
        longer = [replace(a, parts=a.parts + b.parts) for a, b in pairs]
        sources, targets = longer[: shape[0]], longer[shape[0] :]
        return replace(self, sources=tuple(sources), targets=tuple(targets))


def moves_of(schedule: Schedule, performers: Sequence[int]) -> list[list[Move]]:
    """Returns the moves of each phase of a schedule. `performers[r]` performs the moves into the
    memory of rank r.

    If one rank performs all moves, they form one phase, and a reduction writes its result to all
    ranks at once. Raises `UnsupportedError` for a schedule that keeps results in memory of its own,
    or in which ranks read a place in the round that writes it.

    >>> from unisono.algorithms import build
    >>> ((one,),) = moves_of(build("all_reduce", "direct", ranks=2), [0, 0])
    >>> len(one.sources), len(one.targets), one.sources[0].parts
    (2, 2, 2)
    """
    rounds = [sorted(moves, key=_position) for moves in _rounds(schedule, performers)]
    if len(set(performers)) == 1:
        rounds = [_at_once(schedule.collective, [move for moves in rounds for move in moves])]
    return [_longer(moves) for moves in rounds]


def _rounds(schedule: Schedule, performers: Sequence[int]) -> list[list[Move]]:
    """Returns the moves of each round, then those within a rank's own memory in the first phase."""
    collective = schedule.collective
    where = {
        (rank, chunk): _place(rank, False, collective.input_ref(rank, chunk))
        for rank in range(collective.ranks)
        for chunk in collective.initial(rank)
    }
    kept = dict(where)
    phases = []
    for _, transfers in schedule.rounds():
        folds = _folds(transfers)
        _require_unwritten_sources(schedule, folds)
        phase = []
        for (rank, chunk), found in folds.items():
            kept.pop((rank, chunk), None)
            target = _output(schedule, rank, chunk)
            sources = tuple(where[source] for source in found)
            phase.append(Move(performer=performers[rank], sources=sources, targets=(target,)))
        where |= {place: _output(schedule, *place) for place in folds}
        phases.append(phase)
    own = [
        Move(
            performer=performers[rank], sources=(place,), targets=(_output(schedule, rank, chunk),)
        )
        for (rank, chunk), place in kept.items()
        if collective.wants(rank, chunk)
    ]
    if not phases:
        return [own] if own else []
    return [[*own, *phases[0]], *phases[1:]]


def _folds(transfers: Sequence[Transfer]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Returns, for each location that a round writes, the locations that it combines."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for each in transfers:
        for offset in range(each.count):
            target = each.dst, each.dst_chunk + offset
            sources = found.setdefault(target, [target] if each.reduce else [])
            sources.append((each.src, each.src_chunk + offset))
    return {target: sorted(sources) for target, sources in found.items()}


def _require_unwritten_sources(
    schedule: Schedule, folds: dict[tuple[int, int], list[tuple[int, int]]]
) -> None:
    """Raises `UnsupportedError` if the order of a round's moves would change their results."""
    for target, sources in folds.items():
        for rank, chunk in sources:
            if (rank, chunk) in folds and (rank, chunk) != target:
                raise UnsupportedError(
                    f"{schedule.algorithm}: rank {rank} writes chunk {chunk} in the round in which "
                    f"rank {target[0]} reads it; expected an algorithm such as direct or ring"
                )


def _output(schedule: Schedule, rank: int, chunk: int) -> Place:
    collective = schedule.collective
    wanted = chunk < collective.num_chunks and collective.wants(rank, chunk)
    if not wanted:
        raise UnsupportedError(
            f"{schedule.algorithm}: rank {rank} keeps chunk {chunk} in memory of its own; expected "
            "an algorithm that writes results only, such as direct"
        )
    return _place(rank, True, collective.output_ref(rank, chunk))


def _place(rank: int, is_output: bool, ref: tuple[int, int] | None) -> Place:
    assert ref is not None
    return Place(rank=rank, is_output=is_output, piece=ref[0], part=ref[1])


def _at_once(collective: Collective, moves: Sequence[Move]) -> list[Move]:
    """Returns moves in which a copy is a further target of the move that made its source."""
    found: list[Move] = []
    made: dict[Place, int] = {}
    for move in moves:
        maker = made.get(move.sources[0]) if len(move.sources) == 1 else None
        later = [] if maker is None else found[maker + 1 :]
        if maker is None or _use(collective, later) & _memory(collective, move.targets):
            made |= dict.fromkeys(move.targets, len(found))
            if len(move.sources) == 1:
                made[move.sources[0]] = len(found)
            found.append(move)
        else:
            made |= dict.fromkeys(move.targets, maker)
            found[maker] = replace(found[maker], targets=(*found[maker].targets, *move.targets))
    return [replace(each, targets=tuple(sorted(each.targets, key=_rank))) for each in found]


def _use(collective: Collective, moves: Sequence[Move]) -> set[Place]:
    """Returns the memory that moves read or write."""
    return _memory(collective, [each for move in moves for each in (*move.sources, *move.targets)])


def _memory(collective: Collective, places: Sequence[Place]) -> set[Place]:
    """Returns places; those that an in-place call has in both arrays as places of the output."""
    found = set()
    for each in places:
        piece = each.piece
        if not each.is_output:
            shared = collective.in_place_output(each.rank, each.piece)
            if shared is None:
                found.add(each)
                continue
            piece = shared
        found.add(replace(each, is_output=True, piece=piece))
    return found


def _rank(place: Place) -> int:
    return place.rank


def _longer(moves: Sequence[Move]) -> list[Move]:
    """Returns moves in which consecutive moves of adjacent places are joined."""
    found: list[Move] = []
    for move in moves:
        joined = None
        if found and found[-1].performer == move.performer:
            joined = found[-1].joined(move)
        if joined is None:
            found.append(move)
        else:
            found[-1] = joined
    return found


def _position(move: Move) -> tuple[object, ...]:
    """Returns a key that brings moves of adjacent places together."""
    places = (*move.sources, *move.targets)
    order = tuple((each.rank, each.is_output) for each in places)
    return move.performer, len(move.sources), order, tuple((e.piece, e.part) for e in places)
