"""Point-to-point: send, recv, both at once, and exchanges with any neighbours.

The functions with a `self` are methods of `Communicator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unisono.communicator.arrays import Array, duplicate, empty, overlap, stage
from unisono.communicator.engine import Engine, Message
from unisono.communicator.numbers import TAGS, check_rank, check_tag
from unisono.communicator.rows import rows, split
from unisono.errors import UnsupportedError

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator

_ANY_SOURCE = -1
_NEIGHBOR_TAG = TAGS


# ---- the methods


def send(self: Communicator, x: Array, dst: int, tag: int = 0, *, async_op: bool = False) -> Any:
    """Sends `x` to rank `dst`, which may be this rank. May return before it is received."""
    message = _sending(self._engine, x, dst, check_tag(tag))
    return self._engine.deliver([message], None, async_op)


def recv(
    self: Communicator, x: Array, src: int | None = None, tag: int = 0, *, async_op: bool = False
) -> Any:
    """Receives into `x` from rank `src`, or from any rank; returns the rank it came from.

    The message must have the type and length of `x`, else `MismatchError`.
    """
    engine = self._engine
    message = _receiving(engine, x, src, check_tag(tag))
    if async_op:
        return engine.deliver([message], x, async_op)
    if engine.recording:
        if src is None:
            raise UnsupportedError(
                "inside a batch, a receive from any rank needs async_op=True: its Work tells the "
                "source"
            )
        engine.deliver([message], x, False)
        return src
    (work,) = engine.post([message])
    work.wait()
    return work.source_rank()


def sendrecv(
    self: Communicator,
    x: Array,
    dst: int,
    out: Array,
    src: int | None = None,
    tag: int = 0,
    *,
    async_op: bool = False,
) -> Any:
    """Sends `x` to rank `dst` while it receives `out` from rank `src`, or from any; returns `out`.

    Neither waits for the other, so rings and pairs of ranks may all call it. `out` may be `x`.
    """
    engine = self._engine
    incoming = _receiving(engine, out, src, check_tag(tag))
    outgoing = _sending(engine, x, dst, tag)
    if overlap(outgoing.staged.located, incoming.staged.located):
        outgoing = _sending(engine, duplicate(x), dst, tag)
    return engine.deliver([incoming, outgoing], out, async_op)


def neighbor_exchange(
    self: Communicator,
    x: Array | Sequence[Array],
    neighbors: Sequence[int],
    out: Array | Sequence[Array] | None = None,
    sources: Sequence[int] | None = None,
    *,
    async_op: bool = False,
) -> Any:
    """Sends piece i of `x` to rank `neighbors[i]`; piece i of `out` comes from `sources[i]`.

    What MPI calls a neighbourhood all-to-all. Every rank gives lists of its own, of any length;
    whom one sends to must have it among its sources. `sources` are by default the neighbours. `x`
    and `out` are lists with an array of any length for each, or one array of equal shares of rows;
    `out=None` allocates: pieces as long as those sent to the same neighbours, or else as the shares
    of one array. Several pieces from one rank to another arrive in their order in the lists: on a
    ring that may have two ranks, give `neighbors=[left, right], sources=[right, left]`, since what
    one sends to its left the other receives from its right. Only neighbours wait for each other.

    Returns `out`. A piece that is not as long as its place raises `MismatchError`.
    """
    engine = self._engine
    origins = neighbors if sources is None else sources
    parts = _pieces(x, len(neighbors), "x")
    if out is None:
        out = _room(x, len(neighbors), len(origins), sources is None)
    places = _pieces(out, len(origins), "out")
    who = "a neighbour" if sources is None else "a source"
    incoming = [
        _receiving(engine, place, src, _NEIGHBOR_TAG, who)
        for place, src in zip(places, origins, strict=True)
    ]
    taken = [message.staged.located for message in incoming]
    outgoing = []
    for part, dst in zip(parts, neighbors, strict=True):
        message = _sending(engine, part, dst, _NEIGHBOR_TAG, "a neighbour")
        if any(overlap(message.staged.located, place) for place in taken):
            message = message._replace(staged=stage(duplicate(part), writable=False))
        outgoing.append(message)
    return engine.deliver([*incoming, *outgoing], out, async_op)


# ---- what they have in common


def _sending(engine: Engine, x: Array, dst: int, tag: int, name: str = "dst") -> Message:
    check_rank(dst, engine.size, name)
    return Message(True, stage(x, writable=False), dst, tag)


def _receiving(engine: Engine, x: Array, src: int | None, tag: int, name: str = "src") -> Message:
    if src is not None:
        check_rank(src, engine.size, name)
    peer = _ANY_SOURCE if src is None else src
    return Message(False, stage(x, writable=True), peer, tag, x)


def _pieces(x: Array | Sequence[Array], count: int, what: str) -> Sequence[Array]:
    """One array for each of `count` neighbours."""
    if isinstance(x, (list, tuple)):
        if len(x) != count:
            raise ValueError(f"{what} has {len(x)} arrays for {count} neighbours")
        return x
    have = rows(x, what)
    share = have.count // count if count else 0
    if share * count != have.count:
        raise ValueError(f"{what} has {have.count} rows: no equal shares for {count} neighbours")
    return split(x, [share] * count)


def _room(
    x: Array | Sequence[Array], sent: int, received: int, symmetric: bool
) -> Array | list[Array]:
    """Where as much may come as is sent."""
    if isinstance(x, (list, tuple)):
        if not symmetric:
            raise ValueError("neighbor_exchange needs out where x is a list and sources are given")
        return [empty(piece, tuple(piece.shape)) for piece in x]
    if not sent:
        raise ValueError("neighbor_exchange needs out where nothing is sent")
    have = rows(x, "x")
    return empty(x, (have.count // sent * received, *have.shape))
