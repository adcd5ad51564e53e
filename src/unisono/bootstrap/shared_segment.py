"""Bootstrap on one host: the ranks find each other and share one memory segment.

Rank 0 listens on an abstract Unix socket, whose name is derived from the job's rendezvous text. The
other ranks connect. The kernel tells each end the other end's user (SO_PEERCRED), and other users
are rejected. Rank 0 passes the descriptor of a memfd and a nonce. Each rank maps the memfd and
compares the nonce with the one in the memory, which proves that all ranks are on one host. Neither
the socket nor the memory has a name in the file system, so no file is left behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator

from unisono.bootstrap import segment_creation
from unisono.bootstrap.file_descriptors import Shortage, shortage_of
from unisono.bootstrap.group_config import (
    GroupConfig,
    JoinedGroup,
    OpenGroup,
    open_group,
    shape_for,
)
from unisono.bootstrap.single_copy import NO_SINGLE_COPY, single_copy_for
from unisono.bootstrap.unix_socket import WATCH_S, connect, listen, one_user_only, user_of
from unisono.errors import AuthenticationError, RendezvousError, UnisonoError
from unisono.native import Group, meshed_cores, usable_cores
from unisono.types import SingleCopy

_log = logging.getLogger("unisono")

_HELLO = struct.Struct("<8sII")  # magic, rank, size
_MAGIC = b"unisono1"
_LENGTH = struct.Struct("<I")  # length of rank 0's data, which follows
_WELCOME, _REFUSAL = b"W", b"R"
_NO, _YES = b"N", b"Y"
_MODES = {SingleCopy.NEVER: b"N", SingleCopy.AUTO: b"A", SingleCopy.ALWAYS: b"Y"}
_MODE_OF_LETTER = {letter: mode for mode, letter in _MODES.items()}
_NONCE_BYTES = 16
_MOST_TEXT_BYTES = 1024
_HELLO_TIMEOUT_S = 5.0
_INT, _RIGHTS = struct.Struct("i"), socket.SCM_RIGHTS
_REPORT_S = 30.0  # maximum seconds for which rank 0 waits for other ranks only to report a failure


def join_segment(group_config: GroupConfig, open_group: OpenGroup = open_group) -> JoinedGroup:
    """Joins the group of `group_config.size` ranks; returns when all have joined.

    Raises `RendezvousError` if a rank is missing at the timeout, or if ranks disagree about rank or
    size. Raises `AuthenticationError` if another user runs the listener.
    """
    return (_lead if group_config.rank == 0 else _follow)(group_config, open_group)


def _receive(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise RendezvousError("a rank closed its connection while the group was being formed")
        data += more
    return data


# ---- rank 0


def _lead(group_config: GroupConfig, open_group: OpenGroup) -> JoinedGroup:
    deadline = time.monotonic() + group_config.timeout_s
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        fd = _create_segment(group_config, nonce)
    except UnisonoError as error:
        _report_failure(group_config, deadline, str(error))
        raise
    followers: dict[int, socket.socket] = {}
    try:
        return _form(group_config, followers, open_group, fd, nonce, deadline)
    except UnisonoError as error:
        for peer in followers.values():
            _refuse(peer, str(error))
        raise
    finally:
        for peer in followers.values():
            peer.close()


def _form(
    group_config: GroupConfig,
    followers: dict[int, socket.socket],
    open_group: OpenGroup,
    fd: int,
    nonce: bytes,
    deadline: float,
) -> JoinedGroup:
    try:
        with listen(group_config, deadline) as listener:
            other_users: set[int] = set()
            while len(followers) < group_config.size - 1:
                _admit(listener, group_config, followers, other_users, deadline)
        for rank, peer in followers.items():
            with _naming_rank(group_config.name(rank)):
                socket.send_fds(peer, [_WELCOME + nonce], [fd])
    except BaseException:
        os.close(fd)
        raise
    group = open_group(fd, 0, nonce)
    with _closed_on_failure(group):
        for rank, peer in sorted(followers.items()):
            with _naming_rank(group_config.name(rank)):
                _expect_joined(peer, group_config.name(rank), deadline)
        wanted = _wanted_single_copy(group_config)
        for rank, peer in followers.items():
            with _naming_rank(group_config.name(rank)):
                rank0_data = _LENGTH.pack(len(group_config.rank0_data)) + group_config.rank0_data
                peer.sendall(_WELCOME + _MODES[wanted] + rank0_data)
        if wanted is not SingleCopy.NEVER and not _agree_on_single_copy(
            group, group_config, followers, deadline
        ):
            wanted = SingleCopy.NEVER
    return JoinedGroup(
        group=group, nonce=nonce, rank0_data=group_config.rank0_data, single_copy=wanted
    )


@contextlib.contextmanager
def _closed_on_failure(group: Group) -> Iterator[None]:
    """Closes a group that failed to form, and frees its memory even while the error is kept."""
    try:
        yield
    except BaseException:
        group.close()
        group.give_back()
        raise


def _wanted_single_copy(group_config: GroupConfig) -> SingleCopy:
    """Returns rank 0's choice of single copy, which all ranks pass to `single_copy_for`. The choice
    is NEVER if no call would use single copy.
    """
    wanted = group_config.single_copy
    if wanted is SingleCopy.AUTO and meshed_cores():
        wanted = SingleCopy.ALWAYS
    rules = single_copy_for(group_config.size, cores=usable_cores(), wanted=wanted)
    return SingleCopy.NEVER if group_config.size == 1 or rules == NO_SINGLE_COPY else wanted


def _agree_on_single_copy(
    group: Group, group_config: GroupConfig, followers: dict[int, socket.socket], deadline: float
) -> bool:
    """Returns True if all ranks can read each other's memory. Sends the result to all ranks."""
    able = group.can_read_peers()
    for rank, peer in followers.items():
        with _naming_rank(group_config.name(rank)):
            peer.settimeout(max(deadline - time.monotonic(), 0.001))
            able &= _receive(peer, 1) == _YES
    for rank, peer in followers.items():
        with _naming_rank(group_config.name(rank)):
            peer.sendall(_YES if able else _NO)
    return able


def _create_segment(group_config: GroupConfig, nonce: bytes) -> int:
    # Needs descriptors for the memory, the listener, and a connection to each other rank.
    shortage = shortage_of(group_config.size + 1, group_config.label)
    if shortage is not None:
        raise RendezvousError(shortage.why)
    shape = group_config.shape
    if shape is None:
        shape = shape_for(group_config.size, usable_cores(), group_config.staging_bytes)
    return segment_creation.create(
        group_config.size, shape.depth, shape.buffer_bytes, nonce, heaps=group_config.heaps
    )


def _report_failure(group_config: GroupConfig, deadline: float, why: str) -> None:
    """Tells all other ranks that no group is formed. Uses two descriptors, if available."""
    informed: dict[int, socket.socket] = {}
    other_users: set[int] = set()
    deadline = min(deadline, time.monotonic() + _REPORT_S)
    with contextlib.suppress(RendezvousError, OSError), listen(group_config, deadline) as listener:
        while len(informed) < group_config.size - 1:
            _admit(listener, group_config, informed, other_users, deadline)
            for peer in informed.values():
                _refuse(peer, why)
                peer.close()


def _refuse(peer: socket.socket, why: str) -> None:
    with contextlib.suppress(OSError):
        peer.sendall(_REFUSAL + why.encode()[:_MOST_TEXT_BYTES])


@contextlib.contextmanager
def _naming_rank(rank: int) -> Iterator[None]:
    """Converts the error of a lost connection into an error that names the rank."""
    try:
        yield
    except OSError as error:
        raise RendezvousError(f"rank {rank} was lost while the group was being formed") from error


def _admit(
    listener: socket.socket,
    group_config: GroupConfig,
    followers: dict[int, socket.socket],
    other_users: set[int],
    deadline: float,
) -> None:
    """Admits one more rank.

    A connection that is not from a rank is closed and logged, and the wait continues: other
    processes that can reach the socket must not end the job. `other_users` collects the other users
    that tried.
    """
    missing = sorted(set(range(1, group_config.size)) - set(followers))
    names = [group_config.name(rank) for rank in missing]
    peer = _accept(listener, group_config, deadline)
    if peer is None:
        tried = [_other_user(group_config, user) for user in sorted(other_users)]
        raise RendezvousError(
            f"{group_config.label}: timeout after {group_config.timeout_s:g} s: these ranks of "
            f"{group_config.size} are missing: {names}" + "".join(f"; {text}" for text in tried)
        )
    if (hello := _read_hello(peer, group_config, other_users, deadline)) is None:
        return
    rank, size = hello
    name = group_config.name(rank)
    if size != group_config.size:
        problem = f"rank {name} expects {size} ranks, rank 0 expects {group_config.size}"
    elif rank not in missing:
        problem = f"two processes claim to be rank {name} of {size}"
    else:
        followers[rank] = peer
        return
    _refuse(peer, problem)
    peer.close()
    raise RendezvousError(problem)


def _read_hello(
    peer: socket.socket, group_config: GroupConfig, other_users: set[int], deadline: float
) -> tuple[int, int] | None:
    """Returns the rank and size that a connection sends. Closes and logs a connection that is not
    from a rank.
    """
    user = user_of(peer)
    if user != os.getuid():
        other_users.add(user)
    try:
        if user not in (os.getuid(), 0):
            raise AuthenticationError(f"user {user} tried to join")
        peer.settimeout(min(_HELLO_TIMEOUT_S, max(deadline - time.monotonic(), 0.001)))
        magic, rank, size = _HELLO.unpack(_receive(peer, _HELLO.size))
        if magic != _MAGIC:
            raise AuthenticationError("a process that is not a unisono rank tried to join")
    except (OSError, UnisonoError) as error:
        peer.close()
        why = error if user == os.getuid() else _other_user(group_config, user)
        _log.warning("rendezvous %r: rejected a connection: %s", group_config.rendezvous, why)
        return None
    return rank, size


def _other_user(group_config: GroupConfig, user: int) -> str:
    return one_user_only(group_config.label, "a process that tried to join", user)


def _accept(
    listener: socket.socket, group_config: GroupConfig, deadline: float
) -> socket.socket | None:
    """Returns the next connection; None at the deadline."""
    while True:
        left_s = max(deadline - time.monotonic(), 0.001)
        listener.settimeout(left_s if group_config.watch is None else min(left_s, WATCH_S))
        with contextlib.suppress(TimeoutError):
            return listener.accept()[0]
        if time.monotonic() >= deadline:
            return None
        if group_config.watch is not None:
            group_config.watch()


def _expect_joined(peer: socket.socket, rank: int, deadline: float) -> None:
    peer.settimeout(max(deadline - time.monotonic(), 0.001))
    answer = peer.recv(1)
    if not answer:
        raise ConnectionResetError
    if answer != _WELCOME:
        raise RendezvousError(f"rank {rank} could not join: {_text(peer)}")


# ---- the other ranks


def _follow(group_config: GroupConfig, open_group: OpenGroup) -> JoinedGroup:
    deadline = time.monotonic() + group_config.timeout_s
    shortage = shortage_of(2, group_config.label)  # descriptors for the connection and the memory
    if shortage is not None and shortage.free == 0:
        raise RendezvousError(shortage.why)  # no descriptor is left for a report to rank 0
    with connect(group_config, deadline) as leader:
        try:
            leader.sendall(_HELLO.pack(_MAGIC, group_config.rank, group_config.size))
            group, nonce = _join(leader, group_config, open_group, shortage)
            with _closed_on_failure(group):
                leader.sendall(_WELCOME)
                wanted, rank0_data = _receive_verdict(leader)
                if wanted is not SingleCopy.NEVER:
                    leader.sendall(_YES if group.can_read_peers() else _NO)
                    wanted = wanted if _receive_agreement(leader) else SingleCopy.NEVER
        except TimeoutError:
            raise RendezvousError(
                f"rank {group_config.name(group_config.rank)}: not all {group_config.size} ranks "
                f"came: timeout after {group_config.timeout_s:g} s"
            ) from None
        except OSError as error:
            raise RendezvousError(
                f"{group_config.label}: rank {group_config.name(0)} closed the connection while "
                "the group was being formed (were too many ranks started?)"
            ) from error
    return JoinedGroup(group=group, nonce=nonce, rank0_data=rank0_data, single_copy=wanted)


def _join(
    leader: socket.socket,
    group_config: GroupConfig,
    open_group: OpenGroup,
    shortage: Shortage | None,
) -> tuple[Group, bytes]:
    """Receives and maps the segment, or tells rank 0 the reason if that fails."""
    try:
        if shortage is None:
            return _take_segment(leader, group_config, open_group)
        _decline(leader)
        raise RendezvousError(shortage.why)
    except UnisonoError as error:
        _refuse(leader, str(error))
        raise


def _decline(leader: socket.socket) -> None:
    """Waits until rank 0 offers the group's memory, but does not receive the memory."""
    if _receive(leader, 1) == _REFUSAL:
        raise RendezvousError(_text(leader))
    _receive(leader, _NONCE_BYTES)


def _text(peer: socket.socket) -> str:
    """Receives the reason that the other rank gives for its refusal."""
    return peer.recv(_MOST_TEXT_BYTES).decode(errors="replace")


def _take_segment(
    leader: socket.socket, group_config: GroupConfig, open_group: OpenGroup
) -> tuple[Group, bytes]:
    data, fds, flags = _receive_descriptor(leader)
    if data[:1] == _REFUSAL:
        raise RendezvousError(data[1:].decode(errors="replace"))
    if flags & socket.MSG_CTRUNC and not fds:  # this process had no free descriptor
        raise RendezvousError(
            "too many open files to receive the group's memory; raise the limit (ulimit -n)"
        )
    if data[:1] != _WELCOME or len(fds) != 1 or len(data) != 1 + _NONCE_BYTES:
        for fd in fds:
            os.close(fd)
        raise RendezvousError("rank 0 gave up while the group was being formed")
    nonce = data[1:]
    # From here on the group owns the descriptor, so this function must not close it.
    return open_group(fds[0], group_config.rank, nonce), nonce


def _receive_descriptor(leader: socket.socket) -> tuple[bytes, list[int], int]:
    """Receives data and descriptors. The descriptors are close-on-exec from the start, which
    `socket.recv_fds` cannot do."""
    space = socket.CMSG_LEN(_INT.size)
    data, notes, flags, _ = leader.recvmsg(1 + _MOST_TEXT_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    return data, [_INT.unpack(note)[0] for *_, kind, note in notes if kind == _RIGHTS], flags


def _receive_verdict(leader: socket.socket) -> tuple[SingleCopy, bytes]:
    """Waits until all ranks have joined; returns rank 0's single-copy mode and its data."""
    answer = leader.recv(1)
    if answer == _REFUSAL:
        raise RendezvousError(_text(leader))
    if answer != _WELCOME:
        raise RendezvousError("rank 0 gave up while the group was being formed")
    letter = _receive(leader, 1)
    (length,) = _LENGTH.unpack(_receive(leader, _LENGTH.size))
    wanted = _MODE_OF_LETTER.get(letter)
    if wanted is None:
        raise RendezvousError("rank 0 uses another version of this protocol")
    return wanted, _receive(leader, length)


def _receive_agreement(leader: socket.socket) -> bool:
    """Returns True if rank 0 answers that all ranks can read each other's memory."""
    answer = _receive(leader, 1)
    if answer == _REFUSAL:
        raise RendezvousError(_text(leader))
    return answer == _YES
