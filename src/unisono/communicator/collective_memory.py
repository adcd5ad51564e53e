"""Memory of a collective's pieces: addresses, lengths, shares, and copies of overlapping arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from unisono.communicator.arrays import (
    Array,
    Located,
    Staged,
    assign,
    duplicate,
    empty_like,
    overlap,
    stage,
    stage_pieces,
)
from unisono.communicator.engine import Memory


def stage_many(x: Array | Sequence[Array], ranks: int, *, writable: bool) -> list[Staged]:
    """Returns the memory of `x`: one array for all ranks, or a list of one array per rank."""
    if isinstance(x, (list, tuple)):
        return stage_pieces(x, ranks, writable=writable, what="out" if writable else "x")
    return [stage(x, writable=writable)]


def memory_of(staged: list[Staged], ranks: int) -> Memory:
    """Returns the address and the length in bytes of each rank's piece."""
    if len(staged) == 1:
        return _shares(staged[0].located, ranks)
    return [piece.located[:2] for piece in staged]


class Pieces(NamedTuple):
    """One piece of memory for each rank, and the arrays that contain these pieces."""

    staged: list[Staged]
    memory: Memory

    @classmethod
    def of(cls, staged: list[Staged], ranks: int) -> Pieces:
        """Returns equal shares of one array, or the arrays of a list."""
        return cls(staged, memory_of(staged, ranks))

    @classmethod
    def consecutive(cls, staged: list[Staged], lengths: Sequence[int]) -> Pieces:
        """Returns consecutive pieces of one array, of `lengths` bytes, or the arrays of a list."""
        if len(staged) > 1:
            return cls.of(staged, len(lengths))
        starts = itertools.accumulate(lengths, initial=staged[0].located[0])
        return cls(staged, list(zip(starts, lengths, strict=False)))


def _shares(located: Located, ranks: int) -> Memory:
    share = located[1] // ranks
    return [(located[0] + r * share, share) for r in range(ranks)]


def lengths_of(staged: list[Staged], ranks: int, name: str) -> tuple[int, ...]:
    """Returns the bytes of each piece. Raises `ValueError` if `staged` is one array for all ranks
    that cannot be split into equal shares.
    """
    if len(staged) == 1 and staged[0].count % ranks:
        raise ValueError(
            f"{name}: expected a multiple of {ranks} elements, but it has {text_of(staged[0])}"
        )
    return tuple(length for _, length in memory_of(staged, ranks))


def share_of(x: Array | Sequence[Array], ranks: int, rank: int) -> Array:
    """Returns an uninitialised array for the share of a rank."""
    if isinstance(x, (list, tuple)):
        return empty_like(x[rank], tuple(x[rank].shape))
    shape = tuple(x.shape)  # type: ignore[union-attr]
    if shape and shape[0] % ranks == 0:
        return empty_like(x, (shape[0] // ranks, *shape[1:]))
    return empty_like(x, (int(np.prod(shape)) // ranks,))


def copied_where_overlapping(sources: list[Staged], targets: list[Staged]) -> list[Staged]:
    """Returns `sources`, or copies if the results would overwrite the sources before they are
    sent.
    """
    several = len(sources) + len(targets) > 2
    if several and not overlap(_extent(sources), _extent(targets)):
        return sources
    if not any(overlap(s.located, t.located) for s in sources for t in targets):
        return sources
    return [stage(duplicate(source.array), writable=False) for source in sources]


def _extent(staged: list[Staged]) -> Located:
    """Returns the smallest memory region that contains all these arrays."""
    start = min(each.located[0] for each in staged)
    return start, max(sum(each.located[:2]) for each in staged) - start, staged[0].located[2]


def assigning(target: Array, value: Array) -> Callable[[], None]:
    """Returns a function that copies `value` to `target` after the call."""
    return lambda: assign(target, value)


def restoring(targets: list[Staged]) -> Callable[[], None] | None:
    """Returns a function that copies results to the caller's arrays; None if no array was
    copied.
    """
    copied = [target for target in targets if target.copy is not None]
    if not copied:
        return None

    def restore() -> None:
        for target in copied:
            target.restore()

    return restore


def text_of(staged: Staged, nbytes: int | None = None) -> str:
    """Returns the number and type of the elements, for an error text. If `nbytes` is given, counts
    only the elements in `nbytes` bytes.
    """
    count = staged.count if nbytes is None else nbytes // staged.dtype.size_bytes
    return f"{count} elements of {staged.dtype.name.lower()}"
