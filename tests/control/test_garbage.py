"""Whatever a rank says that has proved itself: the thread of the links takes it, or refuses it by
the one error that ends the connection."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connection_managers import SECRET, WORLD
from unisono.control.control_group import ControlGroup
from unisono.control.entered_groups import EnteredGroups
from unisono.control.group_endpoint import PeerInfo
from unisono.control.messages import (
    CALLED_BYTES,
    ControlMessage,
    MessageKind,
    failed_body,
    looked_bodies,
)
from unisono.control.peer_messages import PeerMessages, RecoveryInbox
from unisono.control.server import ControlServer
from unisono.control.vote import VotePhase, VoteRequest
from unisono.control.world import World, WorldConfig
from unisono.native import Group, create_segment, usable_cores
from unisono.transport.connection import Connection
from unisono.transport.event_loop import EventLoop
from unisono.transport.introduction import ConnectionKind, Introduction, tag_of
from unisono.transport.security import CLEAR

RANKS = 3
TAG = tag_of(b"a group")

numbers = st.integers(0, 2**32 - 1)
ranks = st.one_of(st.integers(0, RANKS), numbers)
ballots = st.one_of(st.integers(0, 9), numbers)
asks = st.builds(VoteRequest, step=st.sampled_from(VotePhase), ballot=ballots, choice=ballots)
bodies = st.one_of(
    st.binary(max_size=100),
    st.builds(failed_body, numbers, st.text(max_size=20)),
    st.builds(
        lambda called: looked_bodies(called)[0],
        st.lists(
            st.tuples(ranks, st.binary(min_size=CALLED_BYTES, max_size=CALLED_BYTES)), max_size=3
        ),
    ),
    asks.map(VoteRequest.pack),
    st.builds(lambda head, ask: head + ask.pack(), st.binary(min_size=9, max_size=9), asks),
)
messages = st.builds(
    ControlMessage,
    say=st.sampled_from(MessageKind),
    origin=ranks,
    tag=st.one_of(st.just(TAG), st.binary(min_size=32, max_size=32)),
    to=st.lists(ranks, max_size=3).map(tuple),
    body=bodies,
)
fuzzed = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def place() -> Iterator[World]:
    loop = EventLoop()  # that is not started: it only writes down what is to be watched
    contacts = [
        PeerInfo(rank=rank, host=rank // 2, addresses=(("127.0.0.1", 1),)) for rank in range(RANKS)
    ]
    terms = WorldConfig(
        world=WORLD,
        rank=0,
        contacts=tuple(contacts),
        sources=("127.0.0.1",),
        secret=SECRET,
        security=CLEAR,
        streams=1,
        peer_timeout_s=1.0,
        timeout_s=1.0,
    )
    yield World(loop=loop, terms=terms, tell=lambda _: None)
    loop.join(1)


@contextmanager
def core_group() -> Iterator[Group]:
    """Rank 0, with rank 1 on its host, as the core has it."""
    nonce = secrets.token_bytes(16)
    fd = create_segment(2, 4, 1 << 14, nonce)
    group = Group.of_hosts(fd, 0, RANKS, [0, 1], nonce, usable_cores())
    yield group
    group.close()


def unwanted(sock: Connection, why: str) -> None:
    raise AssertionError(f"nobody has connected: {why}")


@fuzzed
@given(said=st.lists(messages, min_size=1, max_size=4))
def test_a_group_of_the_core_takes_what_came_through(
    place: World, said: list[ControlMessage]
) -> None:
    groups = EnteredGroups(unwanted)
    circle = ControlGroup(place, TAG, range(RANKS), b"", groups.hear, groups.orphaned)
    with core_group() as group:
        groups.enter(TAG, range(RANKS), 0, group, circle)
        for message in said:
            with suppress(ValueError):
                groups.hear(message, circle)
        groups.leave_all()


@fuzzed
@given(said=st.lists(messages, min_size=1, max_size=4))
def test_the_middle_of_a_star(place: World, said: list[ControlMessage]) -> None:
    hub = ControlServer(
        place.loop, 0, dict.fromkeys(range(RANKS), "host"), 1.0, b"", lambda _: None
    )
    for message in said:
        if message.say is not MessageKind.BYE:  # which takes a line
            with suppress(ValueError):
                hub._heard(1, message)


class Ear:
    """A line that takes every answer."""

    def say(self, message: ControlMessage) -> None:
        message.pack()


@fuzzed
@given(said=st.lists(messages, min_size=1, max_size=4))
def test_what_is_said_to_one_who_shrinks(place: World, said: list[ControlMessage]) -> None:
    groups = EnteredGroups(unwanted)
    circle = ControlGroup(place, TAG, range(RANKS), b"", groups.hear, groups.orphaned)
    post = PeerMessages(place, groups, lambda message: groups.hear(message, circle))
    with core_group() as group:
        groups.enter(TAG, range(RANKS), 0, group, circle)
        post.open((TAG, TAG), (), RecoveryInbox())
        for message in said:
            with suppress(ValueError):
                post.heard(message.origin, message, Ear())  # type: ignore[arg-type]
        groups.leave_all()


@pytest.mark.parametrize("rank", [0, 1, RANKS])
def test_who_has_no_reason_to_dial_for_a_group_is_refused(place: World, rank: int) -> None:
    """Rank 1 is on this host, where the core takes no connection of it."""
    refused: list[str] = []
    groups = EnteredGroups(lambda sock, why: refused.append(why))
    circle = ControlGroup(place, TAG, range(RANKS), b"", groups.hear, groups.orphaned)
    with core_group() as group, Connection() as sock:
        groups.enter(TAG, range(RANKS), 0, group, circle)
        groups.take(sock, Introduction(kind=ConnectionKind.COLLECTIVES, rank=rank, pid=1, tag=TAG))
        groups.leave_all()
    assert refused == [f"rank {rank} must not dial for this group"]
