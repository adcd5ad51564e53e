"""The exception classes of Unisono.

UnisonoError
├── CommunicationError          a collective could not finish; the communicator refuses further work
│   │                           (a RuntimeError, like the errors of torch's own backends)
│   ├── PeerLostError           a rank died or left while others still needed it
│   ├── CollectiveTimeoutError  a rank did not arrive in time
│   ├── MismatchError           the ranks made calls that do not match
│   └── AbortedError            the communicator was aborted or closed here
├── ScheduleError               a schedule does not implement its collective
├── UnsupportedError            this algorithm, operation or type cannot serve the request
├── RendezvousError             the ranks did not find each other
└── AuthenticationError         a process of another job tried to join
"""

from __future__ import annotations


class UnisonoError(Exception):
    """Base class of all errors of this library."""


class CommunicationError(UnisonoError, RuntimeError):
    """A collective could not finish. All later calls of the communicator fail with the same cause.

    This is a RuntimeError, so programs written for Gloo or NCCL also catch it.
    """


class PeerLostError(CommunicationError):
    """A rank died or left while other ranks still needed it."""


class CollectiveTimeoutError(CommunicationError, TimeoutError):
    """A rank did not arrive within the timeout. The message names the rank and its last call."""


class MismatchError(CommunicationError):
    """The ranks of a group called different operations, or one operation with different
    arguments.
    """


class AbortedError(CommunicationError):
    """The communicator was aborted, was closed, or belongs to another process (after a fork)."""


class ScheduleError(UnisonoError, ValueError):
    """A schedule does not implement its collective. The message names the rank, chunk and round."""


class UnsupportedError(UnisonoError, ValueError):
    """The algorithm, operation or element type cannot serve the request."""


class RendezvousError(UnisonoError):
    """The ranks did not find each other in time, or two processes claim the same rank."""


class AuthenticationError(UnisonoError):
    """A process that does not belong to this job tried to join it."""
