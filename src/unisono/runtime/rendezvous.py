"""How the ranks of one host find each other and come to share one memory segment.

Rank 0 listens on an abstract Unix socket whose name is derived from the job's rendezvous text; the
others connect. The kernel tells each side the other's user (SO_PEERCRED), and nobody of another
user is let in. Rank 0 hands over the descriptor of a memfd with a nonce; each rank maps it and
compares the nonce with the one in the memory, which proves that all are on one host. Nothing of
this has a name in the file system, so nothing is left behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from unisono.errors import AuthenticationError, RendezvousError, UnisonoError
from unisono.native import Group, create_segment, meshed_cores, segment_shape, usable_cores
from unisono.runtime.span import Span
from unisono.types import SingleCopy

_log = logging.getLogger("unisono")

_HELLO = struct.Struct("<8sII")  # magic, rank, size
_MAGIC = b"unisono1"
_LENGTH = struct.Struct("<I")  # of the word that follows
_WELCOME, _REFUSAL = b"W", b"R"
_NO, _YES = b"N", b"Y"
_NONCE_BYTES = 16
_MOST_TEXT_BYTES = 1024
_VERDICT_S = 1.0
_HELLO_TIMEOUT_S = 5.0
_WATCH_S = 0.02
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_INT, _RIGHTS = struct.Struct("i"), socket.SCM_RIGHTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of the staging of each rank: blocks in flight, and bytes of each."""

    depth: int
    area_bytes: int


def shape_for(ranks: int, cores: int, staging_bytes: int) -> Shape:
    """What suits so many ranks of one host, which share `staging_bytes`."""
    depth, area_bytes = segment_shape(ranks, cores, staging_bytes)
    return Shape(depth=depth, area_bytes=area_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Who meets where: `rendezvous` is equal on all ranks and the group's own."""

    rank: int
    size: int
    rendezvous: str
    timeout_s: float
    staging_bytes: int
    word: bytes = b""
    """What rank 0 tells the others."""
    single_copy: SingleCopy = SingleCopy.AUTO
    """Whether they are to read each other's memory, if they can; rank 0's counts."""
    shape: Shape | None = None
    """Of the segment. None: what suits these ranks, this host and `staging_bytes`."""
    names: Sequence[int] = ()
    """What the ranks are called in errors, if they are part of a larger group."""
    watch: Callable[[], None] | None = None
    """Called every 20 ms while this rank waits for others to come; raises `RendezvousError` when
    there is no use in it."""

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}: ranks are counted from 0 to size-1")
        if self.names and len(self.names) != self.size:
            raise ValueError(f"{len(self.names)} names for {self.size} ranks")

    def name(self, rank: int) -> int:
        """What a rank is called in errors."""
        return self.names[rank] if self.names and 0 <= rank < self.size else rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """The group, its nonce (a name that no other group has), and the word of rank 0; and what it
    has of the network, if it spans hosts."""

    group: Group
    nonce: bytes
    word: bytes
    span: Span | None = None
    single_copy: bool = False
    """Whether all ranks are to read each other's memory, and can."""

    def close(self) -> None:
        """Leaves the group in good order."""
        self.group.close()
        if self.span is not None:
            self.span.leave()


OpenGroup = Callable[[int, int, bytes], Group]
"""Makes the group of a rank: (descriptor of the segment, which the group closes; rank; nonce)."""


def open_group(fd: int, rank: int, nonce: bytes) -> Group:
    """The group of a rank whose peers are all on this host."""
    return Group(fd, rank, nonce, usable_cores())


def meet(meeting: Meeting, open_group: OpenGroup = open_group) -> Met:
    """Joins the group of `meeting.size` ranks; returns when all are there.

    Raises `RendezvousError` if they are not within the timeout or disagree about who they are,
    `AuthenticationError` if the listener belongs to another user.
    """
    return (_lead if meeting.rank == 0 else _follow)(meeting, open_group)


def _address(meeting: Meeting) -> str:
    digest = hashlib.sha256(f"{os.getuid()}\0{meeting.rendezvous}".encode()).hexdigest()
    return f"\0unisono-{digest[:40]}"


def _uid_of_peer(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def _receive(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise RendezvousError("a rank gave up while the group was being formed")
        data += more
    return data


# ---- rank 0


def _lead(meeting: Meeting, open_group: OpenGroup) -> Met:
    followers: dict[int, socket.socket] = {}
    try:
        return _form(meeting, followers, open_group)
    except RendezvousError as error:
        for peer in followers.values():
            _refuse(peer, str(error))
        raise
    finally:
        for peer in followers.values():
            peer.close()


def _form(meeting: Meeting, followers: dict[int, socket.socket], open_group: OpenGroup) -> Met:
    deadline = time.monotonic() + meeting.timeout_s
    nonce = secrets.token_bytes(_NONCE_BYTES)
    fd = _create_segment(meeting, nonce)
    try:
        with _listen(meeting, deadline) as listener:
            while len(followers) < meeting.size - 1:
                _admit(listener, meeting, followers, deadline)
        for rank, peer in followers.items():
            with _naming(meeting.name(rank)):
                socket.send_fds(peer, [_WELCOME + nonce], [fd])
    except BaseException:
        os.close(fd)
        raise
    group = open_group(fd, 0, nonce)
    for rank, peer in sorted(followers.items()):
        with _naming(meeting.name(rank)):
            _expect_joined(peer, meeting.name(rank), deadline)
    wanted = meeting.size > 1 and _wants_single_copy(meeting.single_copy)
    for rank, peer in followers.items():
        with _naming(meeting.name(rank)):
            word = _LENGTH.pack(len(meeting.word)) + meeting.word
            peer.sendall(_WELCOME + (_YES if wanted else _NO) + word)
    agreed = wanted and _ask_all(group, meeting, followers, deadline)
    return Met(group=group, nonce=nonce, word=meeting.word, single_copy=agreed)


def _wants_single_copy(single_copy: SingleCopy) -> bool:
    return single_copy is SingleCopy.ALWAYS or (single_copy is SingleCopy.AUTO and meshed_cores())


def _ask_all(
    group: Group, meeting: Meeting, followers: dict[int, socket.socket], deadline: float
) -> bool:
    """Whether all ranks can read each other's memory, as all are told."""
    able = group.can_borrow()
    for rank, peer in followers.items():
        with _naming(meeting.name(rank)):
            peer.settimeout(max(deadline - time.monotonic(), 0.001))
            able &= _receive(peer, 1) == _YES
    for rank, peer in followers.items():
        with _naming(meeting.name(rank)):
            peer.sendall(_YES if able else _NO)
    return able


def _create_segment(meeting: Meeting, nonce: bytes) -> int:
    shape = meeting.shape
    if shape is None:
        shape = shape_for(meeting.size, usable_cores(), meeting.staging_bytes)
    return create_segment(meeting.size, shape.depth, shape.area_bytes, nonce)


def _refuse(peer: socket.socket, why: str) -> None:
    with contextlib.suppress(OSError):
        peer.sendall(_REFUSAL + why.encode()[:_MOST_TEXT_BYTES])


@contextlib.contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Turns the loss of a connection into an error that says whose it was."""
    try:
        yield
    except OSError as error:
        raise RendezvousError(f"rank {rank} was lost while the group was being formed") from error


def _listen(meeting: Meeting, deadline: float) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    while True:
        try:
            listener.bind(_address(meeting))
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


def _admit(
    listener: socket.socket,
    meeting: Meeting,
    followers: dict[int, socket.socket],
    deadline: float,
) -> None:
    """Lets one more rank in; a stranger is turned away, logged, and does no harm."""
    missing = sorted(set(range(1, meeting.size)) - set(followers))
    names = [meeting.name(rank) for rank in missing]
    peer = _accept(listener, meeting, deadline)
    if peer is None:
        raise RendezvousError(
            f"after {meeting.timeout_s:g} s these ranks of {meeting.size} had not come: {names}"
        )
    left_s = deadline - time.monotonic()
    try:
        if _uid_of_peer(peer) not in (os.getuid(), 0):
            raise AuthenticationError(f"user {_uid_of_peer(peer)} tried to join")
        peer.settimeout(min(_HELLO_TIMEOUT_S, max(left_s, 0.001)))
        magic, rank, size = _HELLO.unpack(_receive(peer, _HELLO.size))
        if magic != _MAGIC:
            raise AuthenticationError("a process that is no unisono rank tried to join")
    except (OSError, UnisonoError) as error:
        peer.close()
        _log.warning("rendezvous %r: turned a connection away: %s", meeting.rendezvous, error)
        return
    problem = None
    if size != meeting.size:
        problem = f"rank {meeting.name(rank)} expects {size} ranks, rank 0 expects {meeting.size}"
    elif rank not in missing:
        problem = f"two processes claim to be rank {meeting.name(rank)} of {size}"
    if problem is None:
        followers[rank] = peer
        return
    _refuse(peer, problem)
    peer.close()
    raise RendezvousError(problem)


def _accept(listener: socket.socket, meeting: Meeting, deadline: float) -> socket.socket | None:
    """The next connection; None if none came in time."""
    while True:
        left_s = max(deadline - time.monotonic(), 0.001)
        listener.settimeout(left_s if meeting.watch is None else min(left_s, _WATCH_S))
        with contextlib.suppress(TimeoutError):
            return listener.accept()[0]
        if time.monotonic() >= deadline:
            return None
        if meeting.watch is not None:
            meeting.watch()


def _expect_joined(peer: socket.socket, rank: int, deadline: float) -> None:
    peer.settimeout(max(deadline - time.monotonic(), 0.001))
    answer = peer.recv(1)
    if not answer:
        raise ConnectionResetError
    if answer != _WELCOME:
        raise RendezvousError(f"rank {rank} could not map the group's memory")


# ---- the others


def _follow(meeting: Meeting, open_group: OpenGroup) -> Met:
    deadline = time.monotonic() + meeting.timeout_s
    with _connect(meeting, deadline) as leader:
        try:
            leader.sendall(_HELLO.pack(_MAGIC, meeting.rank, meeting.size))
            group, nonce = _take_segment(leader, meeting, open_group)
            leader.sendall(_WELCOME)
            asked, word = _hear(leader)
            if asked:
                leader.sendall(_YES if group.can_borrow() else _NO)
            agreed = asked and _receive(leader, 1) == _YES
        except TimeoutError:
            raise RendezvousError(
                f"rank {meeting.name(meeting.rank)}: not all {meeting.size} ranks came within "
                f"{meeting.timeout_s:g} s"
            ) from None
        except OSError as error:
            raise RendezvousError(
                f"{_who(meeting)}: rank {meeting.name(0)} closed the connection while the "
                "group was being formed (were too many ranks started?)"
            ) from error
    return Met(group=group, nonce=nonce, word=word, single_copy=agreed)


def _who(meeting: Meeting) -> str:
    return f"rank {meeting.name(meeting.rank)} of {meeting.size}"


def _connect(meeting: Meeting, deadline: float) -> socket.socket:
    pause_s = 0.001
    while True:
        leader = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            leader.connect(_address(meeting))
            break
        except OSError:
            leader.close()
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"{_who(meeting)}: rank {meeting.name(0)} did not listen within "
                    f"{meeting.timeout_s:g} s (rendezvous {meeting.rendezvous!r}; are all ranks "
                    "on one host?)"
                ) from None
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05 if meeting.watch is None else _WATCH_S)
            if meeting.watch is not None:
                meeting.watch()
    if _uid_of_peer(leader) not in (os.getuid(), 0):
        leader.close()
        raise AuthenticationError("the listener at the rendezvous belongs to another user")
    # Rank 0 may have begun to wait later; what it says when it gives up is worth waiting for.
    leader.settimeout(max(deadline - time.monotonic(), 0) + _VERDICT_S)
    return leader


def _take_segment(
    leader: socket.socket, meeting: Meeting, open_group: OpenGroup
) -> tuple[Group, bytes]:
    data, fds, flags = _receive_descriptor(leader)
    if data[:1] == _REFUSAL:
        raise RendezvousError(data[1:].decode(errors="replace"))
    if flags & socket.MSG_CTRUNC and not fds:  # so the kernel says it
        raise RendezvousError(
            "too many open files to take in the group's memory; raise the limit (ulimit -n)"
        )
    if data[:1] != _WELCOME or len(fds) != 1 or len(data) != 1 + _NONCE_BYTES:
        for fd in fds:
            os.close(fd)
        raise RendezvousError("rank 0 gave up while the group was being formed")
    nonce = data[1:]
    # From here the descriptor is the group's, which closes it.
    return open_group(fds[0], meeting.rank, nonce), nonce


def _receive_descriptor(leader: socket.socket) -> tuple[bytes, list[int], int]:
    """No program that any thread starts inherits it: `socket.recv_fds` ignores its flags."""
    space = socket.CMSG_LEN(_INT.size)
    data, notes, flags, _ = leader.recvmsg(1 + _MOST_TEXT_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    return data, [_INT.unpack(note)[0] for *_, kind, note in notes if kind == _RIGHTS], flags


def _hear(leader: socket.socket) -> tuple[bool, bytes]:
    """Waits until all have joined; returns whether rank 0 asks about memory, and its word."""
    answer = leader.recv(1)
    if answer == _REFUSAL:
        raise RendezvousError(leader.recv(_MOST_TEXT_BYTES).decode(errors="replace"))
    if answer != _WELCOME:
        raise RendezvousError("rank 0 gave up while the group was being formed")
    asked = _receive(leader, 1) == _YES
    (length,) = _LENGTH.unpack(_receive(leader, _LENGTH.size))
    return asked, _receive(leader, length)
