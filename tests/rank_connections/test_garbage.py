"""Random messages of an authenticated rank are handled or refused with ValueError, which closes the
connection.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connection_managers import SECRET, WORLD
from unisono.native import Group, create_segment, usable_cores
from unisono.rank_connections.control_group import ControlGroup
from unisono.rank_connections.control_messages import (
    CALLED_BYTES,
    ControlMessage,
    MessageKind,
    pack_failure,
    pack_last_calls,
)
from unisono.rank_connections.control_server import ControlServer
from unisono.rank_connections.entered_groups import EnteredGroups
from unisono.rank_connections.group_endpoint import PeerInfo
from unisono.rank_connections.paxos_acceptor import VotePhase, VoteRequest
from unisono.rank_connections.peer_messages import PeerMessages, RecoveryInbox
from unisono.rank_connections.world import World, WorldConfig
from unisono.transport.connection import Connection
from unisono.transport.event_loop import EventLoop
from unisono.transport.introduction import ConnectionKind, Introduction, tag_of
from unisono.transport.security import CLEAR

RANKS = 3
TAG = tag_of(b"a group")

numbers = st.integers(0, 2**32 - 1)
ranks = st.one_of(st.integers(0, RANKS), numbers)
ballots = st.one_of(st.integers(0, 9), numbers)
requests = st.builds(VoteRequest, phase=st.sampled_from(VotePhase), ballot=ballots, choice=ballots)
bodies = st.one_of(
    st.binary(max_size=100),
    st.builds(pack_failure, numbers, st.text(max_size=20)),
    st.builds(
        lambda called: pack_last_calls(called)[0],
        st.lists(
            st.tuples(ranks, st.binary(min_size=CALLED_BYTES, max_size=CALLED_BYTES)), max_size=3
        ),
    ),
    requests.map(VoteRequest.pack),
    st.builds(
        lambda head, request: head + request.pack(), st.binary(min_size=9, max_size=9), requests
    ),
)
messages = st.builds(
    ControlMessage,
    kind=st.sampled_from(MessageKind),
    origin=ranks,
    tag=st.one_of(st.just(TAG), st.binary(min_size=32, max_size=32)),
    to=st.lists(ranks, max_size=3).map(tuple),
    body=bodies,
)
fuzzed = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def world() -> Iterator[World]:
    loop = EventLoop()  # a loop that is not started, and only records the sockets to watch
    peer_infos = [
        PeerInfo(rank=rank, host=rank // 2, addresses=(("127.0.0.1", 1),)) for rank in range(RANKS)
    ]
    config = WorldConfig(
        world=WORLD,
        rank=0,
        peer_infos=tuple(peer_infos),
        sources=("127.0.0.1",),
        secret=SECRET,
        security=CLEAR,
        streams=1,
        peer_timeout_s=1.0,
        timeout_s=1.0,
    )
    yield World(loop=loop, config=config, send=lambda _: None)
    loop.join(1)


@contextmanager
def core_group() -> Iterator[Group]:
    """Yields rank 0's native group; rank 1 is on the same host."""
    nonce = secrets.token_bytes(16)
    fd = create_segment(2, 4, 1 << 14, nonce)
    group = Group.of_hosts(fd, 0, RANKS, [0, 1], nonce, usable_cores())
    yield group
    group.close()


def fail_on_refusal(sock: Connection, why: str) -> None:
    raise AssertionError(f"nobody has connected: {why}")


@fuzzed
@given(sent=st.lists(messages, min_size=1, max_size=4))
def test_a_native_group_survives_random_messages(world: World, sent: list[ControlMessage]) -> None:
    groups = EnteredGroups(fail_on_refusal)
    control_group = ControlGroup(world, TAG, range(RANKS), b"", groups.handle, groups.server_lost)
    with core_group() as group:
        groups.enter(TAG, range(RANKS), 0, group, control_group)
        for message in sent:
            with suppress(ValueError):
                groups.handle(message, control_group)
        groups.leave_all()


@fuzzed
@given(sent=st.lists(messages, min_size=1, max_size=4))
def test_a_control_server_survives_random_messages(
    world: World, sent: list[ControlMessage]
) -> None:
    server = ControlServer(
        world.loop, 0, dict.fromkeys(range(RANKS), "host"), 1.0, b"", lambda _: None
    )
    for message in sent:
        if message.kind is not MessageKind.BYE:  # a BYE message needs a channel
            with suppress(ValueError):
                server._received(1, message)


class AnyChannel:
    """A simulated channel that accepts all answers and drops them."""

    def send(self, message: ControlMessage) -> None:
        message.pack()


@fuzzed
@given(sent=st.lists(messages, min_size=1, max_size=4))
def test_recovery_survives_random_messages(world: World, sent: list[ControlMessage]) -> None:
    groups = EnteredGroups(fail_on_refusal)
    control_group = ControlGroup(world, TAG, range(RANKS), b"", groups.handle, groups.server_lost)
    peer_messages = PeerMessages(
        world, groups, lambda message: groups.handle(message, control_group)
    )
    with core_group() as group:
        groups.enter(TAG, range(RANKS), 0, group, control_group)
        peer_messages.open_attempt((TAG, TAG), (), RecoveryInbox())
        for message in sent:
            with suppress(ValueError):
                peer_messages.received(message.origin, message, AnyChannel())  # type: ignore[arg-type]
        groups.leave_all()


@pytest.mark.parametrize("rank", [0, 1, RANKS])
def test_a_rank_that_must_not_dial_for_a_group_is_refused(world: World, rank: int) -> None:
    """Tests ranks that must not connect: rank 0 itself, rank 1 on the same host, and a rank out of
    range.
    """
    refused: list[str] = []
    groups = EnteredGroups(lambda sock, why: refused.append(why))
    control_group = ControlGroup(world, TAG, range(RANKS), b"", groups.handle, groups.server_lost)
    with core_group() as group, Connection() as sock:
        groups.enter(TAG, range(RANKS), 0, group, control_group)
        groups.take(sock, Introduction(kind=ConnectionKind.COLLECTIVES, rank=rank, pid=1, tag=TAG))
        groups.leave_all()
    assert refused == [f"rank {rank} must not dial for this group"]
