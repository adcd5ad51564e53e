"""MPI as the transport between hosts, through mpi4py. Implements the message library interface of
`csrc/transport`.

This serves clusters whose fabric (InfiniBand, RoCE, Slingshot) is supported by their MPI. Messages
go from memory to memory, without a copy in Python. MPI cannot sleep until a message arrives, so a
waiting rank polls, with short sleeps once nothing moves.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from unisono.errors import PeerLostError, UnsupportedError

WATCH_TAG = 0
_TRANSPORTS = 2
LAST_TAG = WATCH_TAG + 1 + 2 * _TRANSPORTS
_FAREWELL_S = 0.5  # maximum seconds to wait for incoming messages when a transport is closed
_FAREWELL_NAP_S = 100e-6
_NEEDS_MPI = "MPI as transport needs mpi4py: pip install 'unisono[mpi]'"


def load_mpi() -> ModuleType:
    """Imports `mpi4py.MPI`, which initialises MPI unless the program has done so.

    Raises `UnsupportedError` if mpi4py is not installed or finds no MPI, or if MPI was initialised
    without `MPI_THREAD_MULTIPLE`, which calls by several threads need.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library was found
        raise UnsupportedError(f"{_NEEDS_MPI} ({error})") from error
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise UnsupportedError(
            "MPI as transport needs an MPI that is initialised and not finalised"
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UnsupportedError(
            "MPI as transport needs MPI_THREAD_MULTIPLE, but MPI was initialised with less: leave "
            "mpi4py.rc.threads (MPI4PY_RC_THREADS) and mpi4py.rc.thread_level as they are"
        )
    return MPI


class MpiLibrary:
    """The message library of one transport: moves its messages over an MPI communicator.

    Only one thread at a time calls the methods. Memory at a passed address must stay valid until
    the transfer with its ticket ends. Sizes are in bytes. Heads and payloads have separate tags, so
    that each kind arrives in the order of its sends.
    """

    def __init__(self, mpi: ModuleType, comm: Any, kind: int) -> None:
        self._mpi = mpi
        self._comm = comm
        self._head_tag, self._payload_tag = WATCH_TAG + 1 + 2 * kind, WATCH_TAG + 2 + 2 * kind
        self._ring: list[Any] = []
        self._first = 0  # index of the oldest posted receive in `_ring`
        self._next = 0  # index of the next receive in `_ring` to post again
        self._posted = 0
        # pending transfers: each of the next three lists has one entry per transfer
        self._requests: list[Any] = []
        self._tickets: list[int] = []
        self._inward: list[bool] = []  # true for receives
        self.over = False
        """True once the library is closed and MPI uses none of its memory."""

    def listen(self, address: int, slot_bytes: int, slots: int) -> None:
        """Posts receives of message heads from any rank into `slots` consecutive buffers, in
        order.
        """
        for slot in range(slots):
            memory = self._memory(address + slot * slot_bytes, slot_bytes)
            request = self._comm.Recv_init(memory, self._mpi.ANY_SOURCE, self._head_tag)
            request.Start()
            self._ring.append(request)
        self._posted = slots

    def reuse(self) -> None:
        """Posts a receive into the oldest filled slot again."""
        self._ring[self._next].Start()
        self._next = (self._next + 1) % len(self._ring)
        self._posted += 1

    def send_head(self, peer: int, address: int, size: int, ticket: int) -> bool:
        """Sends a message head. Returns True if the send is already complete. Raises
        `PeerLostError`.
        """
        return self._send(peer, address, size, ticket, self._head_tag)

    def send(self, peer: int, address: int, size: int, ticket: int) -> bool:
        """Sends a payload. Returns True if the send is already complete. Raises `PeerLostError`."""
        return self._send(peer, address, size, ticket, self._payload_tag)

    def receive(self, peer: int, address: int, size: int, ticket: int) -> bool:
        """Receives a peer's next payload. Returns True if the receive is already complete. Raises
        `PeerLostError`.
        """
        try:
            request = self._comm.Irecv(self._memory(address, size), peer, self._payload_tag)
            return self._over(request, ticket, inward=True)
        except self._mpi.Exception as error:
            raise _lost(peer, error) from error

    def poll(self) -> int | tuple[int, list[tuple[int, str]]]:
        """Returns the number of newly filled slots, and the tickets of complete transfers if there
        are any.

        Each ticket comes with the reason of its failure, which is empty after a success. Tests the
        slots last: a head that was sent before the content of a payload changed is then found with
        this payload.
        """
        ended = self._some_ended() if self._requests else []
        filled = 0
        try:
            while self._posted and self._ring[self._first].Test():
                self._first = (self._first + 1) % len(self._ring)
                self._posted -= 1
                filled += 1
        except self._mpi.Exception as error:
            raise PeerLostError(f"MPI brings nothing from other hosts any more: {error}") from error
        return (filled, ended) if ended else filled

    def close(self) -> bool:
        """Cancels pending transfers. Returns True if MPI no longer uses any of the memory.

        MPI can cancel only a receive without a matching send. A message in flight gets a short time
        to arrive. A send cannot be cancelled: MPI may read its memory as late as in MPI_Finalize,
        of this process or of the peer.
        """
        self.over = self._mpi.Is_finalized() or self._give_up()
        return self.over

    def _give_up(self) -> bool:
        order = self._ring[self._first :] + self._ring[: self._first]
        heads, idle = order[: self._posted], order[self._posted :]
        coming = [r for r, inward in zip(self._requests, self._inward, strict=True) if inward]
        going = [r for r, inward in zip(self._requests, self._inward, strict=True) if not inward]
        self._ring, self._requests, self._tickets, self._inward = [], [], [], []
        self._posted = 0
        for request in heads + coming:
            with contextlib.suppress(self._mpi.Exception):
                request.Cancel()
        over = self._ended_within(heads + coming, _FAREWELL_S)
        for request in heads if over else ():
            request.Free()
        for request in idle:
            request.Free()
        return over and self._ended_within(going, 0)

    def _ended_within(self, requests: Sequence[Any], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        left = list(requests)
        while left := [request for request in left if not self._ended(request)]:
            if time.monotonic() > deadline:
                return False
            time.sleep(_FAREWELL_NAP_S)
        return True

    def _ended(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception:  # a failed request has ended, too
            return True

    def _memory(self, address: int, size: int) -> list[Any]:
        return [self._mpi.buffer.fromaddress(address, size), self._mpi.BYTE]

    def _send(self, peer: int, address: int, size: int, ticket: int, tag: int) -> bool:
        try:
            request = self._comm.Isend(self._memory(address, size), peer, tag)
            return self._over(request, ticket, inward=False)
        except self._mpi.Exception as error:
            raise _lost(peer, error) from error

    def _over(self, request: Any, ticket: int, *, inward: bool) -> bool:
        if request.Test():
            return True
        self._requests.append(request)
        self._tickets.append(ticket)
        self._inward.append(inward)
        return False

    def _some_ended(self) -> list[tuple[int, str]]:
        try:
            over = self._mpi.Request.Testsome(self._requests)
        except self._mpi.Exception:
            return self._ended_one_by_one()
        if not over:
            return []
        ended = [(self._tickets[i], "") for i in over]
        for i in sorted(over, reverse=True):
            del self._requests[i], self._tickets[i], self._inward[i]
        return ended

    def _ended_one_by_one(self) -> list[tuple[int, str]]:
        """Tests each request after an error, because the error does not name the requests that
        failed.
        """
        ended, left = [], []
        for transfer in zip(self._tickets, self._requests, self._inward, strict=True):
            ticket, request, _ = transfer
            try:
                if request.Test():
                    ended.append((ticket, ""))
                else:
                    left.append(transfer)
            except self._mpi.Exception as error:
                ended.append((ticket, f"MPI: {error}"))
        self._tickets = [ticket for ticket, _, _ in left]
        self._requests = [request for _, request, _ in left]
        self._inward = [inward for _, _, inward in left]
        return ended


class MpiLink:
    """An MPI communicator of the world or of one group. Ranks are numbered as in the group."""

    def __init__(self, mpi: ModuleType, comm: Any) -> None:
        self.mpi = mpi
        self.comm = comm
        self._libraries: list[MpiLibrary] = []

    @property
    def quiet(self) -> bool:
        """True if this link's transports are closed and none of their transfers is in progress."""
        return all(library.over for library in self._libraries)

    def part(self, members: Sequence[int]) -> MpiLink:
        """Returns the link of a group of these ranks, in this order. Only these ranks call this
        method.
        """
        group = self.comm.Get_group()
        chosen = group.Incl(list(members))
        try:
            comm = self.comm.Create_group(chosen)
            comm.Set_errhandler(self.mpi.ERRORS_RETURN)
            return MpiLink(self.mpi, comm)
        finally:
            chosen.Free()
            group.Free()

    def library(self, kind: int) -> MpiLibrary:
        """Makes the message library of the transport for collectives (0) or point-to-point messages
        (1).
        """
        library = MpiLibrary(self.mpi, self.comm, kind)
        self._libraries.append(library)
        return library


def _lost(peer: int, error: Exception) -> PeerLostError:
    return PeerLostError(f"MPI does not reach rank {peer}: {error}")
