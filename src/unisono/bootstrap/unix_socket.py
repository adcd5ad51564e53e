"""The abstract Unix socket through which the ranks of one host find each other.

Its name is a hash of the user and the rendezvous.
"""

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
"""Interval at which a waiting rank calls `GroupConfig.watch`."""

_VERDICT_S = 1.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_USERS_S = 1.0  # interval at which a rank that finds no rank 0 checks if another user runs rank 0


def user_of(connection: socket.socket) -> int:
    """Returns the user of the process at the other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def listen(group_config: GroupConfig, deadline: float) -> socket.socket:
    """Listens as rank 0. Raises `RendezvousError` if another process listens already."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    while True:
        try:
            listener.bind(_address(group_config, os.getuid()))
            listener.listen(group_config.size)
            return listener
        except OSError as error:
            # Another group of the same name may be forming; its listener closes soon.
            if time.monotonic() > deadline:
                listener.close()
                raise RendezvousError(
                    f"another rank 0 already listens for the rendezvous {group_config.rendezvous!r}"
                ) from error
            time.sleep(0.01)


def connect(group_config: GroupConfig, deadline: float) -> socket.socket:
    """Connects to rank 0. Raises `RendezvousError` if rank 0 does not listen in time, or if another
    user runs rank 0. Raises `AuthenticationError` if another user listens at this user's socket
    name.
    """
    pause_s = 0.001
    check_at = time.monotonic() + _USERS_S
    while True:
        leader = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            leader.connect(_address(group_config, os.getuid()))
            break
        except OSError:
            leader.close()
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"{group_config.label}: rank {group_config.name(0)} did not listen at "
                    f"the rendezvous {group_config.rendezvous!r}: timeout after "
                    f"{group_config.timeout_s:g} s; are all ranks on one host?"
                ) from None
            if time.monotonic() > check_at:
                check_at += _USERS_S
                _require_one_user(group_config)
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05 if group_config.watch is None else WATCH_S)
            if group_config.watch is not None:
                group_config.watch()
    user = user_of(leader)
    if user not in (os.getuid(), 0):
        leader.close()
        raise AuthenticationError(
            one_user_only(group_config.label, f"the listener as rank {group_config.name(0)}", user)
            + "; if the listener is not a rank of this job, choose another rendezvous than "
            f"{group_config.rendezvous!r}"
        )
    # Rank 0 may have started later than this rank. Then rank 0's deadline, at which it reports a
    # failure, is later than this rank's deadline.
    leader.settimeout(max(deadline - time.monotonic(), 0) + _VERDICT_S)
    return leader


def one_user_only(mine: str, other: str, user: int) -> str:
    """Returns the error text for ranks of two users; `mine` denotes this process."""
    return (
        f"{mine} runs as user {os.getuid()}, {other} as user {user}: one user must run all ranks "
        "of a job"
    )


def _address(group_config: GroupConfig, user: int) -> str:
    digest = hashlib.sha256(f"{user}\0{group_config.rendezvous}".encode()).hexdigest()
    return f"\0unisono-{digest[:40]}"


def _require_one_user(group_config: GroupConfig) -> None:
    """Raises `RendezvousError` if another user's rank 0 listens for this rendezvous."""
    for user in _users() - {os.getuid()}:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
            caller.connect(_address(group_config, user))
            raise RendezvousError(
                one_user_only(group_config.label, f"rank {group_config.name(0)}", user)
            )


def _users() -> set[int]:
    """Returns the users that run processes here, as far as this process may see."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                found.add(process.stat().st_uid)
    return found
