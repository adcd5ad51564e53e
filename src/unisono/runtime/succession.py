"""Forms the group that succeeds a failed one: the loop around `runtime/agreement.py`.

It moves the messages, looks who is gone, keeps the ledger and forms the groups that are tried. All
that it needs of the old group is in `Ties`, so that the same loop serves wherever ranks are.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from unisono import native
from unisono.errors import AbortedError, RendezvousError
from unisono.runtime import agreement
from unisono.runtime.agreement import (
    Advance,
    Advanced,
    Event,
    Finish,
    Form,
    Formed,
    GiveUp,
    Heard,
    Look,
    Send,
)
from unisono.runtime.ballots import pack, unpack
from unisono.runtime.meeting import Meeting, Met
from unisono.runtime.postbox import Postbox
from unisono.runtime.rendezvous import meet

_log = logging.getLogger("unisono")

_LEFT_BEHIND = (
    "rank {rank}: the others go on without this rank: it came to shrink when that was over, later "
    "than they waited, or they left it out"
)
_LOOK_S = 0.01  # how often a rank looks who is gone, while nothing comes


@dataclass(frozen=True, slots=True, kw_only=True)
class Succession:
    """A rank of the old group that asks for the new one.

    `name` is the old group's own; `exclude` holds its ranks that are to be left out.
    """

    name: str
    rank: int
    ranks: int
    exclude: frozenset[int]
    timeout_s: float
    staging_bytes: int
    word: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Successor:
    """The new group, and which ranks of the old one are its ranks 0, 1, ..."""

    met: Met
    members: tuple[int, ...]


class TooFewError(Exception):
    """So few ranks are within reach that others may go on without them."""


class Ties(Protocol):
    """What still ties a rank to the others of a group that has failed. One thread uses it."""

    def send(self, to: int, data: bytes) -> None:
        """Sends at once or later, in order; returns at once."""

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """What has come, by whom; waits at most `timeout_s` for something."""

    def keep_up(self) -> frozenset[int]:
        """Sends what waits; says who is gone for certain. Called often."""

    def advance(self, expected: int, desired: int) -> int:
        """Moves the ledger if it is at `expected`; where it was. Raises `TooFewError` where that
        takes more ranks than can be reached."""

    def form(self, succession: Succession, ballot: int, members: tuple[int, ...]) -> Met:
        """Forms the group of a ballot. Raises `RendezvousError` if that fails, also when a member
        is gone or the ledger has moved on."""

    def close(self, *, finished: bool) -> None:
        """The end of it; others need not wait for who has not `finished`."""


def meeting_of(
    ties: Ties, succession: Succession, ballot: int, members: tuple[int, ...]
) -> Meeting:
    """How the members of a ballot's group meet: as those of any other, but they are watched."""

    def watch() -> None:
        lost = ties.keep_up() & frozenset(members)
        if lost:
            raise RendezvousError(f"lost while the group was being formed: {sorted(lost)}")
        if ties.advance(0, 0) != agreement.undecided(ballot):
            raise RendezvousError("another group is being formed")

    return Meeting(
        rank=members.index(succession.rank),
        size=len(members),
        rendezvous=f"shrink-{succession.name}-{ballot}",
        timeout_s=succession.timeout_s,
        staging_bytes=succession.staging_bytes,
        word=succession.word,
        watch=watch,
    )


class HostTies:
    """Ties between ranks of one host: the old group's memory, and datagrams."""

    def __init__(self, group: native.Group, succession: Succession) -> None:
        self._group = group
        self._others = [r for r in range(succession.ranks) if r != succession.rank]
        self._box = Postbox(succession.name, succession.rank, succession.ranks)
        self.send = self._box.send
        self.receive = self._box.receive

    def keep_up(self) -> frozenset[int]:
        """Sends what waits; asks the kernel who is gone."""
        gone = frozenset(rank for rank in self._others if not self._group.present(rank))
        self._box.drop(gone)
        self._box.flush()
        return gone

    def advance(self, expected: int, desired: int) -> int:
        """Moves the word in the old group's memory."""
        return self._group.exchange_successor(expected, desired)

    def form(self, succession: Succession, ballot: int, members: tuple[int, ...]) -> Met:
        return meet(meeting_of(self, succession, ballot, members))

    def close(self, *, finished: bool) -> None:
        """Closes the box; who has not finished leaves the group, as all see."""
        self._box.close()


def succeed(group: native.Group, succession: Succession, ties: Ties) -> Successor:
    """The group of those who are left of `group`, the same on all of them.

    Raises `AbortedError` if the others go on without this rank, or may do so. A rank that raises
    has left the old group, so that nobody waits for it; but where too few are left, it has not, and
    may try again with others excluded.
    """
    finished = False
    try:
        successor = _Loop(succession, ties).run()
        finished = True
    except TooFewError as error:
        group.abort(str(error))
        raise AbortedError(str(error)) from None
    except BaseException:
        group.close()
        raise
    finally:
        ties.close(finished=finished)
    # The old group is of no use to anybody now; who was left out learns it from its next call.
    group.abort(f"the communicator was shrunk to its {_named(successor.members)}")
    return successor


class _Loop:
    """One rank's way through the agreement."""

    def __init__(self, succession: Succession, ties: Ties) -> None:
        self._succession = succession
        self._ties = ties
        self._state = agreement.begin(
            rank=succession.rank,
            ranks=succession.ranks,
            timeout_s=succession.timeout_s,
            now=time.monotonic(),
            exclude=succession.exclude,
        )
        self._met: Met | None = None

    def run(self) -> Successor:
        try:
            return self._run()
        except BaseException:
            self._drop()
            raise

    def _run(self) -> Successor:
        timeout_s = 0.0
        while True:
            # Messages first: one that was stopped for a while must not take those for late whose
            # messages wait for it. And a look when they have been taken, for that may have moved
            # the ledger.
            for heard in self._heard(timeout_s):
                if (successor := self._happen(heard)) is not None:
                    return successor
            look = Look(gone=self._ties.keep_up(), entry=self._ties.advance(0, 0))
            if (successor := self._happen(look)) is not None:
                return successor
            timeout_s = _LOOK_S

    def _heard(self, timeout_s: float) -> Iterable[Heard]:
        for source, data in self._ties.receive(timeout_s):
            try:
                message = unpack(data, self._succession.ranks)
            except ValueError as error:
                _log.warning("ignored what came as from rank %d: %s", source, error)
            else:
                yield Heard(source=source, message=message)

    def _happen(self, event: Event) -> Successor | None:
        """Takes a step, and does what it asks for, which brings further steps."""
        events = [event]
        while events:
            late = self._state.late
            self._state, actions = agreement.step(self._state, events.pop(0), time.monotonic())
            if self._state.late - late:
                names = _named(sorted(self._state.late - late))
                _log.warning("rank %d shrinks without late %s", self._succession.rank, names)
            for action in actions:
                match action:
                    case Send():
                        self._ties.send(action.to, pack(action.message))
                    case Advance(expected=expected, desired=desired):
                        seen = self._ties.advance(expected, desired)
                        events.append(Advanced(expected=expected, desired=desired, seen=seen))
                    case Form():
                        events.append(Formed(ballot=action.ballot, good=self._form(action)))
                    case Finish():
                        assert self._met is not None, "only what was formed is decided"
                        return Successor(met=self._met, members=self._state.members)
                    case GiveUp():
                        raise AbortedError(_LEFT_BEHIND.format(rank=self._succession.rank))
        return None

    def _form(self, order: Form) -> bool:
        self._drop()
        with contextlib.suppress(RendezvousError):
            self._met = self._ties.form(self._succession, order.ballot, order.members)
        return self._met is not None

    def _drop(self) -> None:
        """Closes the group of a ballot that came to nothing."""
        if self._met is not None:
            self._met.close()
        self._met = None


def _named(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
