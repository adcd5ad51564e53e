"""Point-to-point: send, recv, both at once, and exchanges with any neighbours.

Messages from one rank to another with one tag are received in the order in which they were sent.
The functions with a `self` are methods of `Communicator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono import native
from unisono.communicator.arguments import TAGS, check_rank, check_tag
from unisono.communicator.arrays import Array, duplicate, empty, overlap, stage
from unisono.communicator.engine import Engine, MessageCall
from unisono.communicator.rows import rows, split
from unisono.errors import UnsupportedError
from unisono.types import DType

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator

_NEIGHBOR_TAG = TAGS


class Probed(NamedTuple):
    """A message that nobody has received yet."""

    source: int
    tag: int
    nbytes: int
    dtype: DType


# ---- the methods


def send(self: Communicator, x: Array, dst: int, tag: int = 0, *, async_op: bool = False) -> Any:
    """Sends `x` to rank `dst`, which may be this rank.

    A message of a few KiB may leave before anybody asks for it; a larger one waits for its
    receiver. With `async_op=True` the caller does not: `x` belongs to the call until the `Work` is
    done.
    """
    done = self._messages.send(x, dst, tag, async_op)
    if done is not NotImplemented:
        return done
    engine = self._engine
    message = _sending(engine, x, dst, check_tag(tag))
    return engine.deliver([message], None, async_op)


def recv(
    self: Communicator,
    x: Array,
    src: int | None = None,
    tag: int | None = 0,
    *,
    async_op: bool = False,
) -> Any:
    """Receives into `x` from rank `src`, or from any rank; returns the rank it came from.

    `tag=None` takes a message of any tag. The message must have the type and length of `x`, else
    `MismatchError`.
    """
    done = self._messages.recv(x, src, tag, async_op)
    if done is not NotImplemented:
        return done
    engine = self._engine
    message = _receiving(engine, x, src, _wanted(tag))
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
    (work,) = engine.post([message], in_background=False)
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
    if not async_op:
        done = self._messages.sendrecv(x, dst, out, src, tag)
        if done is not NotImplemented:
            return done
    engine = self._engine
    incoming = _receiving(engine, out, src, check_tag(tag))
    outgoing = _sending(engine, x, dst, tag)
    if overlap(outgoing.staged.located, incoming.staged.located):
        outgoing = _sending(engine, duplicate(x), dst, tag)
    return engine.deliver([incoming, outgoing], out, async_op)


def send_init(self: Communicator, x: Array, dst: int, tag: int = 0) -> native.Request:
    """Makes a `Work` that begins with each `start()`, as a pipeline sends one memory each step.

    Its arguments are checked here, once. `x` must be contiguous, and its memory must stay where it
    is. The same as `MPI_Send_init`.

    >>> import numpy as np, unisono
    >>> x, y = np.zeros(2), np.zeros(2)
    >>> with unisono.init(rank=0, size=1, rendezvous="example of a pipeline") as comm:
    ...     step = [comm.recv_init(y, 0), comm.send_init(x, 0)]
    ...     for x[:] in (1.0, 2.0):
    ...         results = unisono.Work.wait_all([request.start() for request in step])
    >>> y.tolist()
    [2.0, 2.0]
    """
    return _persistent(self._engine, _sending(self._engine, x, dst, check_tag(tag)))


def recv_init(
    self: Communicator, x: Array, src: int | None = None, tag: int | None = 0
) -> native.Request:
    """Makes a receive that begins with each `start()`; see `send_init`."""
    return _persistent(self._engine, _receiving(self._engine, x, src, _wanted(tag)))


def probe(
    self: Communicator,
    src: int | None = None,
    tag: int | None = None,
    timeout_s: float | None = None,
) -> Probed:
    """Waits for a message from rank `src`, or any, with `tag`, or any, and says what it is.

    The message is still to be received: by `recv` with the source and tag that this returns. Raises
    `TimeoutError` if none has come after `timeout_s` seconds.

    >>> import numpy as np, unisono
    >>> with unisono.init(rank=0, size=1, rendezvous="example of a probe") as comm:
    ...     nothing = comm.iprobe()
    ...     work = comm.send(np.arange(3.0), 0, tag=7, async_op=True)
    ...     found = comm.probe(src=0)
    ...     y = np.empty(found.nbytes // found.dtype.size_bytes)
    ...     source = comm.recv(y, found.source, found.tag)
    >>> nothing, found.tag, y.tolist()
    (None, 7, [0.0, 1.0, 2.0])
    """
    limit_s = -1.0 if timeout_s is None else max(0.0, timeout_s)
    found = _probe(self._engine, src, tag, True, limit_s)
    if found is None:
        raise TimeoutError(f"no such message has come after {timeout_s:g} s (timeout)")
    return found


def iprobe(self: Communicator, src: int | None = None, tag: int | None = None) -> Probed | None:
    """Says what `recv` would receive, without waiting; None if no such message has come."""
    return _probe(self._engine, src, tag, False, 0.0)


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


def _wanted(tag: int | None) -> int:
    return native.ANY_TAG if tag is None else check_tag(tag)


def _source(engine: Engine, src: int | None, name: str = "src") -> int:
    if src is None:
        return native.ANY_SOURCE
    check_rank(src, engine.size, name)
    return src


def _probe(
    engine: Engine, src: int | None, tag: int | None, waits: bool, limit_s: float
) -> Probed | None:
    engine.refuse_in_batch("probe")
    source, wanted = _source(engine, src), _wanted(tag)
    engine.reach(source)
    found = engine.messages.probe(source, wanted, waits, limit_s)
    if found is None:
        return None
    source, tag, nbytes, dtype = found
    return Probed(source, tag, nbytes, DType(dtype))


def _persistent(engine: Engine, message: MessageCall) -> native.Request:
    engine.refuse_in_batch("a persistent request")
    if message.staged.copy is not None:
        raise ValueError("a persistent request needs an array whose elements are contiguous")
    return engine.request(message, persistent=True)


def _sending(engine: Engine, x: Array, dst: int, tag: int, name: str = "dst") -> MessageCall:
    check_rank(dst, engine.size, name)
    return MessageCall(True, stage(x, writable=False), dst, tag)


def _receiving(
    engine: Engine, x: Array, src: int | None, tag: int, name: str = "src"
) -> MessageCall:
    return MessageCall(False, stage(x, writable=True), _source(engine, src, name), tag, x)


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
