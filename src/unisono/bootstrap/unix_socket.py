"""Where the ranks of one host meet: an abstract Unix socket, whose name only their user derives."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.errors import AuthenticationError, RendezvousError

if TYPE_CHECKING:
    from unisono.bootstrap.group_config import GroupConfig

WATCH_S = 0.02
"""How often a waiting rank calls `GroupConfig.watch`."""

_VERDICT_S = 1.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_USERS_S = 1.0  # how often a rank that finds no rank 0 looks for one of another user


def user_of(connection: socket.socket) -> int:
    """The user of the process at the other end, as the kernel knows it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def listen(meeting: GroupConfig, deadline: float) -> socket.socket:
    """Where rank 0 lets the others in. Raises `RendezvousError` if somebody else does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    while True:
        try:
            listener.bind(_address(meeting, os.getuid()))
            listener.listen(meeting.size)
            return listener
        except OSError as error:
            # Another group of the same name may be just forming; it will be gone soon.
            if time.monotonic() > deadline:
                listener.close()
                raise RendezvousError(
                    f"another rank 0 already listens for the rendezvous {meeting.rendezvous!r}"
                ) from error
            time.sleep(0.01)


def connect(meeting: GroupConfig, deadline: float) -> socket.socket:
    """A connection to rank 0. Raises `RendezvousError` if it does not listen in time, or another
    user runs it, `AuthenticationError` if the listener is somebody else."""
    pause_s = 0.001
    look_at = time.monotonic() + _USERS_S
    while True:
        leader = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            leader.connect(_address(meeting, os.getuid()))
            break
        except OSError:
            leader.close()
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"{meeting.who}: rank {meeting.name(0)} did not listen within "
                    f"{meeting.timeout_s:g} s (timeout) at the rendezvous {meeting.rendezvous!r}; "
                    "are all ranks on one host?"
                ) from None
            if time.monotonic() > look_at:
                look_at += _USERS_S
                _require_one_user(meeting)
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05 if meeting.watch is None else WATCH_S)
            if meeting.watch is not None:
                meeting.watch()
    user = user_of(leader)
    if user not in (os.getuid(), 0):
        leader.close()
        raise AuthenticationError(
            one_user_only(meeting.who, f"what listens as rank {meeting.name(0)}", user)
            + "; if that is no rank of this job, choose another rendezvous than "
            f"{meeting.rendezvous!r}"
        )
    # Rank 0 may have begun to wait later; what it says when it gives up is worth waiting for.
    leader.settimeout(max(deadline - time.monotonic(), 0) + _VERDICT_S)
    return leader


def one_user_only(mine: str, other: str, user: int) -> str:
    """Why ranks of two users do not come together: `mine` runs as this process does."""
    return (
        f"{mine} runs as user {os.getuid()}, {other} as user {user}: one user must run all ranks "
        "of a job"
    )


def _address(meeting: GroupConfig, user: int) -> str:
    digest = hashlib.sha256(f"{user}\0{meeting.rendezvous}".encode()).hexdigest()
    return f"\0unisono-{digest[:40]}"


def _require_one_user(meeting: GroupConfig) -> None:
    """Raises `RendezvousError` if another user's rank 0 listens for this rendezvous."""
    for user in _users() - {os.getuid()}:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
            caller.connect(_address(meeting, user))
            raise RendezvousError(one_user_only(meeting.who, f"rank {meeting.name(0)}", user))


def _users() -> set[int]:
    """All who run processes here, as far as this one may know."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                found.add(process.stat().st_uid)
    return found
