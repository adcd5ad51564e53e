"""Every error that Unisono raises on purpose.

UnisonoError
├── CommunicationError          a collective could not finish; the communicator refuses further work
│   │                           (a RuntimeError, as what torch's own backends raise)
│   ├── PeerLostError           a rank died or left while others still needed it
│   ├── CollectiveTimeoutError  a rank did not arrive in time
│   ├── MismatchError           the ranks called different things
│   └── AbortedError            the communicator was aborted or closed here
├── ScheduleError               a schedule is not a correct implementation of its collective
├── UnsupportedError            this algorithm, operation or type cannot serve the request
├── RendezvousError             the ranks did not find each other
└── AuthenticationError         a process that is not one of ours tried to join
"""

from __future__ import annotations


class UnisonoError(Exception):
    """Base of all errors raised by this library."""


class CommunicationError(UnisonoError, RuntimeError):
    """A collective could not finish. The communicator refuses all further work with this cause.

    A RuntimeError, so that programs written for Gloo or NCCL catch it as they catch theirs."""


class PeerLostError(CommunicationError):
    """A rank died, or left, while other ranks still needed it."""


class CollectiveTimeoutError(CommunicationError, TimeoutError):
    """A rank did not arrive within the timeout. The text names it and its last call."""


class MismatchError(CommunicationError):
    """The ranks of a group called different operations, or one with different arguments."""


class AbortedError(CommunicationError):
    """The communicator was aborted, was closed, or belongs to another process (after a fork)."""


class ScheduleError(UnisonoError, ValueError):
    """A schedule does not implement its collective. The text names rank, chunk and round."""


class UnsupportedError(UnisonoError, ValueError):
    """The algorithm, operation or element type cannot serve the request."""


class RendezvousError(UnisonoError):
    """The ranks did not find each other in time, or disagree about who they are."""


class AuthenticationError(UnisonoError):
    """A process that does not belong to this job tried to join it."""
