"""MPI as the wire between hosts: what `csrc/transport/message_transport.h` needs of it, by mpi4py.

For clusters whose fabric (InfiniBand, RoCE, Slingshot) the MPI drives. Messages go from memory to
memory, MPI copies nothing that Python sees. MPI cannot sleep until something comes: a rank that
waits looks again and again, with short naps once nothing moves.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from unisono.errors import PeerLostError, UnsupportedError

WATCH_TAG = 0
_WIRES = 2
LAST_TAG = WATCH_TAG + 1 + 2 * _WIRES
_FAREWELL_S = 0.5  # for what is coming when a wire is closed
_FAREWELL_NAP_S = 100e-6
_NEEDS_MPI = "MPI as wire needs mpi4py: pip install 'unisono[mpi]'"


def load_mpi() -> ModuleType:
    """`mpi4py.MPI`, which initialises MPI unless the program has.

    Raises `UnsupportedError` if it is not installed, finds no MPI, or if MPI was initialised
    without `MPI_THREAD_MULTIPLE`: calls are made by several threads.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no library of an MPI is found
        raise UnsupportedError(f"{_NEEDS_MPI} ({error})") from error
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise UnsupportedError("MPI as wire needs an MPI that is initialised and not finalised")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UnsupportedError(
            "MPI as wire needs MPI_THREAD_MULTIPLE, but MPI was initialised with less: leave "
            "mpi4py.rc.threads (MPI4PY_RC_THREADS) and mpi4py.rc.thread_level as they are"
        )
    return MPI


class Carrier:
    """What moves the messages of one wire over a communicator of MPI.

    Called by the thread that moves the wire, one at a time. Addresses are of memory that stays
    where it is until its ticket ends; sizes are in bytes. Heads and payloads have a tag each, so
    that each kind arrives in the order in which it was sent.
    """

    def __init__(self, mpi: ModuleType, comm: Any, kind: int) -> None:
        self._mpi = mpi
        self._comm = comm
        self._head_tag, self._payload_tag = WATCH_TAG + 1 + 2 * kind, WATCH_TAG + 2 + 2 * kind
        self._ring: list[Any] = []
        self._first = 0  # of the receives that are posted
        self._next = 0  # to be posted again
        self._posted = 0
        self._requests: list[Any] = []  # under way, with
        self._tickets: list[int] = []
        self._inward: list[bool] = []  # whether they are receives
        self.over = False
        """Whether it is closed, and MPI has nothing of it any more."""

    def listen(self, address: int, slot_bytes: int, slots: int) -> None:
        """Posts receives of heads from anybody into `slots` pieces of memory, in their order."""
        for slot in range(slots):
            memory = self._memory(address + slot * slot_bytes, slot_bytes)
            request = self._comm.Recv_init(memory, self._mpi.ANY_SOURCE, self._head_tag)
            request.Start()
            self._ring.append(request)
        self._posted = slots

    def reuse(self) -> None:
        """Posts the oldest slot that was filled again."""
        self._ring[self._next].Start()
        self._next = (self._next + 1) % len(self._ring)
        self._posted += 1

    def send_head(self, peer: int, address: int, size: int, ticket: int) -> bool:
        """True: it is over already. Raises `PeerLostError`."""
        return self._send(peer, address, size, ticket, self._head_tag)

    def send(self, peer: int, address: int, size: int, ticket: int) -> bool:
        """A payload. True: it is over already. Raises `PeerLostError`."""
        return self._send(peer, address, size, ticket, self._payload_tag)

    def receive(self, peer: int, address: int, size: int, ticket: int) -> bool:
        """The next payload of a peer. True: it is over already. Raises `PeerLostError`."""
        try:
            request = self._comm.Irecv(self._memory(address, size), peer, self._payload_tag)
            return self._over(request, ticket, inward=True)
        except self._mpi.Exception as error:
            raise _lost(peer, error) from error

    def poll(self) -> int | tuple[int, list[tuple[int, str]]]:
        """How many slots were filled; and the tickets that have ended, if any, with why they
        failed (empty: they did not)."""
        filled = 0
        try:
            while self._posted and self._ring[self._first].Test():
                self._first = (self._first + 1) % len(self._ring)
                self._posted -= 1
                filled += 1
        except self._mpi.Exception as error:
            raise PeerLostError(f"MPI brings nothing from other hosts any more: {error}") from error
        if not self._requests:
            return filled
        ended = self._some_ended()
        return (filled, ended) if ended else filled

    def close(self) -> bool:
        """Gives up what has not ended; whether MPI needs no memory of it any more.

        Only receives that nobody has sent for can be taken back. What a peer is just sending gets a
        moment to come. What this rank has sent stays to be fetched: MPI may read it as late as in
        MPI_Finalize, of this process or of the peer's.
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
        except self._mpi.Exception:  # an end, too
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
        """After an error of some of them: of which?"""
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
    """A communicator of MPI: that of the world, or one that is a group's own, where rank r of the
    one is rank r of the other."""

    def __init__(self, mpi: ModuleType, comm: Any) -> None:
        self.mpi = mpi
        self.comm = comm
        self._carriers: list[Carrier] = []

    @property
    def quiet(self) -> bool:
        """Whether its wires are closed, and MPI moves nothing for them any more."""
        return all(carrier.over for carrier in self._carriers)

    def part(self, members: Sequence[int]) -> MpiLink:
        """The link of a group of some ranks, in this order; only they call it."""
        group = self.comm.Get_group()
        chosen = group.Incl(list(members))
        try:
            comm = self.comm.Create_group(chosen)
            comm.Set_errhandler(self.mpi.ERRORS_RETURN)
            return MpiLink(self.mpi, comm)
        finally:
            chosen.Free()
            group.Free()

    def carrier(self, kind: int) -> Carrier:
        """For the wire of collectives (0) or of messages (1)."""
        carrier = Carrier(self.mpi, self.comm, kind)
        self._carriers.append(carrier)
        return carrier


def _lost(peer: int, error: Exception) -> PeerLostError:
    return PeerLostError(f"MPI does not reach rank {peer}: {error}")
