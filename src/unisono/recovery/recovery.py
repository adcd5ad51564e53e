"""Forms the group that replaces a failed group: the loop around `recovery/membership_agreement.py`.

The loop sends the messages, detects dead ranks, keeps the ledger, and forms groups. It reaches the
old group only through `RecoveryTransport`, so it serves one host as well as several.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from unisono import native
from unisono.bootstrap import GroupNetwork, JoinedGroup
from unisono.errors import AbortedError, RendezvousError
from unisono.recovery import membership_agreement
from unisono.recovery.host_transport import HostTransport
from unisono.recovery.membership_agreement import (
    Advance,
    Advanced,
    Event,
    Finish,
    Form,
    Formed,
    GiveUp,
    MessageReceived,
    Observation,
    SendMessage,
)
from unisono.recovery.recovery_messages import pack, unpack
from unisono.recovery.transport import RecoveryRequest, RecoveryTransport, TooFewError

_log = logging.getLogger("unisono")

_EXCLUDED = (
    "rank {rank}: the others formed a new group without this rank: it called shrink too late, or "
    "they excluded it"
)
_POLL_S = 0.01  # seconds between checks for dead ranks, while no message arrives


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredGroup:
    """The new group, and the old rank of each of its ranks."""

    joined: JoinedGroup
    members: tuple[int, ...]


def recover(
    group: native.Group, request: RecoveryRequest, network: GroupNetwork | None
) -> RecoveredGroup:
    """Forms a new group of the remaining ranks of `group`, which all get the same list of members.

    Raises `AbortedError` if the others form a group without this rank, or may do so. A rank that
    raises has left the old group, so that no rank waits for it. But if too few ranks are reachable,
    the rank has not left, and may try again with other ranks excluded. Raises `UnsupportedError` if
    `network` cannot be used after a failure.
    """
    transport: RecoveryTransport
    if network is None:
        transport = HostTransport(group, request)
    else:
        from unisono.recovery.cross_host_transport import CrossHostTransport

        transport = CrossHostTransport(network, group, request)
    finished = False
    try:
        recovered = _Loop(request, transport).run()
        finished = True
    except TooFewError as error:
        group.abort(str(error))
        raise AbortedError(str(error)) from None
    except BaseException:
        group.close()
        raise
    finally:
        transport.close(finished=finished)
    # The old group is no longer usable. An excluded rank learns this from its next call.
    group.abort(f"the communicator was shrunk to its {_named(recovered.members)}")
    return recovered


class _Loop:
    """One rank's execution of the agreement."""

    def __init__(self, request: RecoveryRequest, transport: RecoveryTransport) -> None:
        self._request = request
        self._transport = transport
        self._state = membership_agreement.begin(
            rank=request.rank,
            ranks=request.ranks,
            timeout_s=request.timeout_s,
            now=time.monotonic(),
            exclude=request.exclude,
        )
        self._joined: JoinedGroup | None = None

    def run(self) -> RecoveredGroup:
        try:
            return self._run()
        except BaseException:
            self._drop()
            raise

    def _run(self) -> RecoveredGroup:
        timeout_s = 0.0
        while True:
            # Handle messages before the observation: if this rank was stopped for a while, ranks
            # whose messages are waiting must not count as late. The messages may also have changed
            # the ledger.
            for received in self._received(timeout_s):
                if (recovered := self._handle(received)) is not None:
                    return recovered
            observation = Observation(
                gone=self._transport.progress(), entry=self._transport.advance(0, 0)
            )
            if (recovered := self._handle(observation)) is not None:
                return recovered
            timeout_s = _POLL_S

    def _received(self, timeout_s: float) -> Iterable[MessageReceived]:
        for source, data in self._transport.receive(timeout_s):
            try:
                message = unpack(data, self._request.ranks)
            except ValueError as error:
                _log.warning("ignored an invalid message of rank %d: %s", source, error)
            else:
                yield MessageReceived(source=source, message=message)

    def _handle(self, event: Event) -> RecoveredGroup | None:
        """Runs a step of the agreement and its actions, which cause further steps."""
        events = [event]
        while events:
            late = self._state.late
            self._state, actions = membership_agreement.step(
                self._state, events.pop(0), time.monotonic()
            )
            if self._state.late - late:
                names = _named(sorted(self._state.late - late))
                _log.warning("rank %d shrinks without late %s", self._request.rank, names)
            for action in actions:
                match action:
                    case SendMessage():
                        self._transport.send(action.to, pack(action.message))
                    case Advance(expected=expected, desired=desired):
                        seen = self._transport.advance(expected, desired)
                        events.append(Advanced(expected=expected, desired=desired, seen=seen))
                    case Form():
                        events.append(Formed(ballot=action.ballot, good=self._form(action)))
                    case Finish():
                        assert self._joined is not None, "only a formed group is decided"
                        return RecoveredGroup(joined=self._joined, members=self._state.members)
                    case GiveUp():
                        raise AbortedError(_EXCLUDED.format(rank=self._request.rank))
        return None

    def _form(self, order: Form) -> bool:
        self._drop()
        with contextlib.suppress(RendezvousError):
            self._joined = self._transport.form(self._request, order.ballot, order.members)
        return self._joined is not None

    def _drop(self) -> None:
        """Closes the group of a failed ballot."""
        if self._joined is not None:
            self._joined.close()
        self._joined = None


def _named(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
