"""Point-to-point messages: send, recv, sendrecv, probe, and exchanges with any neighbours.

Messages from one rank to another with equal tags arrive in the order of their sends. Functions with
a `self` are methods of `Communicator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono import native
from unisono.communicator.arguments import TAGS, check_rank, check_tag
from unisono.communicator.arrays import Array, duplicate, empty_like, overlap, stage
from unisono.communicator.engine import Engine, MessageCall
from unisono.communicator.row_counts import rows, split
from unisono.errors import UnsupportedError
from unisono.types import DType

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator

_NEIGHBOR_TAG = TAGS
_CHECK_S = 0.05


class Probed(NamedTuple):
    """A message that has arrived but is not yet received."""

    source: int
    tag: int
    nbytes: int
    dtype: DType


# ---- methods of `Communicator`


def send(self: Communicator, x: Array, dst: int, tag: int = 0, *, async_op: bool = False) -> Any:
    """Sends `x` to rank `dst`, which may be this rank.

    A send of a few KiB may return before rank `dst` begins its receive. The send of a larger
    message waits for the receiver. With `async_op=True` the call returns at once, and the
    program must not change `x` until the `Work` is done.
    """
    done = self._messages.send(x, dst, tag, async_op)
    if done is not NotImplemented:
        return done
    engine = self._engine
    message = _sending(engine, x, dst, check_tag(tag))
    return engine.exchange_messages([message], None, async_op)


def recv(
    self: Communicator,
    x: Array,
    src: int | None = None,
    tag: int | None = 0,
    *,
    async_op: bool = False,
) -> Any:
    """Receives into `x` from rank `src`, or from any rank. Returns the source rank.

    With `tag=None`, receives a message with any tag. Raises `MismatchError` unless the message has
    the type and length of `x`.
    """
    done = self._messages.recv(x, src, tag, async_op)
    if done is not NotImplemented:
        return done
    engine = self._engine
    message = _receiving(engine, x, src, _wanted(tag))
    if async_op:
        return engine.exchange_messages([message], x, async_op)
    if engine.recording:
        if src is None:
            raise UnsupportedError(
                "inside a batch, a receive from any rank needs async_op=True: its Work then has "
                "the source"
            )
        engine.exchange_messages([message], x, False)
        return src
    (work,) = engine.begin_messages([message], in_background=False)
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
    """Sends `x` to rank `dst` and receives `out` from rank `src`, or from any rank. Returns `out`.

    Send and receive do not wait for each other, so all ranks of a ring can call it at once. `out`
    may be `x`.
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
    return engine.exchange_messages([incoming, outgoing], out, async_op)


def send_init(self: Communicator, x: Array, dst: int, tag: int = 0) -> native.Request:
    """Makes a persistent send, like `MPI_Send_init`. Each `start()` sends the current content of
    `x`.

    Checks the arguments once, here. `x` must be contiguous, and its memory must not move.

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
    """Makes a persistent receive. Each `start()` begins one receive; see `send_init`."""
    return _persistent(self._engine, _receiving(self._engine, x, src, _wanted(tag)))


def probe(
    self: Communicator,
    src: int | None = None,
    tag: int | None = None,
    timeout_s: float | None = None,
) -> Probed:
    """Waits for a message from rank `src` (None: any) with `tag` (None: any). Returns the message's
    description.

    The message stays available: receive it by `recv` with the returned source and tag. Raises
    `TimeoutError` if no such message arrives within `timeout_s` seconds.

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
        raise TimeoutError(f"no such message arrived: timeout after {timeout_s:g} s")
    return found


def iprobe(self: Communicator, src: int | None = None, tag: int | None = None) -> Probed | None:
    """Returns the description of a message like `probe`, without waiting; None if none has
    arrived.
    """
    return _probe(self._engine, src, tag, False, 0.0)


def wait_for_message(comm: Communicator, *, limit_s: float, checks: bool) -> Probed | None:
    """Waits for a message of any rank and any tag. Returns the message's description, or None after
    `limit_s`.

    Without `checks`, only a message, a failure that another rank reports, or the limit wakes this
    thread up. The thread then does not detect the death of a rank, so it should not depend on a
    rank's answer.
    """
    engine = comm._engine
    return _probe(engine, None, None, True, limit_s, _CHECK_S if checks else limit_s)


def neighbor_exchange(
    self: Communicator,
    x: Array | Sequence[Array],
    neighbors: Sequence[int],
    out: Array | Sequence[Array] | None = None,
    sources: Sequence[int] | None = None,
    *,
    async_op: bool = False,
) -> Any:
    """Sends piece i of `x` to rank `neighbors[i]`. Piece i of `out` comes from `sources[i]`.
    Returns `out`.

    This is MPI's neighbourhood all-to-all. Each rank gives its own lists, of any length. If a rank
    sends to a second rank, it must be in the `sources` of the second rank. `sources` defaults to
    `neighbors`.

    `x` and `out` are each a list of one array per neighbour, of any lengths, or one array of equal
    shares of rows. With `out=None` the call allocates `out`. Its piece i is as long as piece i of
    `x` if `x` is a list, else as long as the shares of `x`.

    Several pieces from one rank to another arrive in the order of the lists. On a ring of possibly
    two ranks, give `neighbors=[left, right], sources=[right, left]`: a piece sent to the left
    arrives from the right. Only neighbours wait for each other.

    Raises `MismatchError` if an arriving piece differs in length from its piece of `out`.
    """
    engine = self._engine
    origins = neighbors if sources is None else sources
    parts = _pieces(x, len(neighbors), "x")
    if out is None:
        out = _allocate(x, len(neighbors), len(origins), sources is None)
    places = _pieces(out, len(origins), "out")
    role = "a neighbour" if sources is None else "a source"
    incoming = [
        _receiving(engine, place, src, _NEIGHBOR_TAG, role)
        for place, src in zip(places, origins, strict=True)
    ]
    pairs = zip(parts, neighbors, strict=True)
    outgoing = [_sending_beside(engine, part, dst, incoming) for part, dst in pairs]
    return engine.exchange_messages([*incoming, *outgoing], out, async_op)


# ---- helper functions


def _wanted(tag: int | None) -> int:
    return native.ANY_TAG if tag is None else check_tag(tag)


def _source(engine: Engine, src: int | None, name: str = "src") -> int:
    if src is None:
        return native.ANY_SOURCE
    check_rank(src, engine.size, name)
    return src


def _probe(
    engine: Engine,
    src: int | None,
    tag: int | None,
    waits: bool,
    limit_s: float,
    check_s: float = _CHECK_S,
) -> Probed | None:
    engine.refuse_in_batch("probe")
    source, wanted = _source(engine, src), _wanted(tag)
    engine.reach(source)
    found = engine.messages.probe(source, wanted, waits, limit_s, check_s)
    if found is None:
        return None
    source, tag, nbytes, dtype = found
    return Probed(source, tag, nbytes, DType(dtype))


def _persistent(engine: Engine, message: MessageCall) -> native.Request:
    engine.refuse_in_batch("a persistent request")
    if message.staged.copy is not None:
        raise ValueError(
            "a persistent request needs a contiguous array: give its .copy() or .contiguous()"
        )
    return engine.request(message, persistent=True)


def _sending(engine: Engine, x: Array, dst: int, tag: int, name: str = "dst") -> MessageCall:
    check_rank(dst, engine.size, name)
    return MessageCall(True, stage(x, writable=False), dst, tag)


def _sending_beside(
    engine: Engine, x: Array, dst: int, incoming: Sequence[MessageCall]
) -> MessageCall:
    """Makes the message that sends `x` to a neighbour. Copies `x` if an incoming message overwrites
    it.
    """
    message = _sending(engine, x, dst, _NEIGHBOR_TAG, "a neighbour")
    if any(overlap(message.staged.located, each.staged.located) for each in incoming):
        return message._replace(staged=stage(duplicate(x), writable=False))
    return message


def _receiving(
    engine: Engine, x: Array, src: int | None, tag: int, name: str = "src"
) -> MessageCall:
    return MessageCall(False, stage(x, writable=True), _source(engine, src, name), tag, x)


def _pieces(x: Array | Sequence[Array], count: int, what: str) -> Sequence[Array]:
    """Returns one array for each of `count` neighbours."""
    if isinstance(x, (list, tuple)):
        if len(x) != count:
            raise ValueError(f"{what}: expected {count} arrays, one per neighbour, not {len(x)}")
        return x
    have = rows(x, what)
    share = have.count // count if count else 0
    if share * count != have.count:
        raise ValueError(
            f"{what}: expected a multiple of {count} rows, one share per neighbour, not "
            f"{have.count}"
        )
    return split(x, [share] * count)


def _allocate(
    x: Array | Sequence[Array], sent: int, received: int, symmetric: bool
) -> Array | list[Array]:
    """Allocates `out` for pieces that are as long as the pieces that this rank sends."""
    if isinstance(x, (list, tuple)):
        if not symmetric:
            raise ValueError("neighbor_exchange needs out if x is a list and sources are given")
        return [empty_like(piece, tuple(piece.shape)) for piece in x]
    if not sent:
        raise ValueError("neighbor_exchange needs out on a rank without neighbors")
    have = rows(x, "x")
    return empty_like(x, (have.count // sent * received, *have.shape))
