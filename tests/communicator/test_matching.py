"""Matching of messages and receives: random sequences of operations, with ranks on one host and on
two.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from histories import History, Message, Receive
from pretended_hosts import World
from unisono import Communicator

# Sizes at the limits of the transports. On one host, the size determines whether a message moves
# through a slot, through the byte ring, or is read directly from the sender's memory, in one or
# several chunks. Between hosts, a message is sent at once or in parts. A few of the largest
# messages exceed the memory for unexpected messages.
SMALL = (0, 8, 24, 25, 3000, 8192, 8193, 16_384, 16_385)
LARGE = (65_535, 65_536, 65_537, 300_000)
ONE_HOST = [(0,) * ranks for ranks in range(1, 7)]
TWO_HOSTS = [(0, 1), (0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1, 1, 0)]
END_S = 20.0


@dataclass(kw_only=True)
class Persistent:
    request: Any
    memory: np.ndarray
    rank: int
    peer: int | None
    tag: int | None
    sends: bool
    begun: Message | Receive | None = None


def last(things: list[Any], back: int) -> Any:
    """Returns an item of a list: the last if `back` is 0. hypothesis draws only `back`, since the
    list's length depends on timing.
    """
    return things[-1 - back % len(things)]


class Matching(RuleBasedStateMachine):
    """Ranks that send, receive, cancel and poll, in random order."""

    layouts: list[tuple[int, ...]]
    worlds: dict[tuple[int, ...], World]

    @initialize(data=st.data(), mixed=st.booleans())
    def join(self, data: st.DataObject, mixed: bool) -> None:
        hosts = data.draw(st.sampled_from(self.layouts))
        if hosts not in self.worlds:
            self.worlds[hosts] = World(hosts, timeout_s=END_S)
        self.world = self.worlds.pop(hosts)  # `teardown` puts the world back into `worlds`
        self.hosts = hosts
        self.routes = data.draw(self.routes_over(hosts))
        self.history = History()
        self.persistent: list[Persistent] = []
        self.began = 0
        # A receive that accepts any tag needs a buffer of the message's length. So either all
        # messages have one length, or a probe first finds the length.
        size = st.sampled_from(LARGE if data.draw(st.booleans()) else SMALL)
        self.sizes = data.draw(st.lists(size, min_size=3, max_size=3)) if mixed else [0] * 3
        if not mixed:
            self.sizes = [data.draw(size)] * 3
        self.tags = st.integers(0, 2)
        self.wanted_tags = self.tags if len(set(self.sizes)) > 1 else st.none() | self.tags

    @staticmethod
    def routes_over(hosts: tuple[int, ...]) -> st.SearchStrategy[list[tuple[int, int]]]:
        """Draws a few pairs (source, destination). With few pairs, more messages match a receive.
        With two hosts, the ranks of each pair are on different hosts, since pairs on one host are
        tested elsewhere.
        """
        ranks = st.integers(0, len(hosts) - 1)
        routes = st.tuples(ranks, ranks)
        if len(set(hosts)) > 1:
            routes = routes.filter(lambda route: hosts[route[0]] != hosts[route[1]])
        return st.lists(routes, min_size=1, max_size=4)

    def sending(self, data: st.DataObject) -> tuple[int, int, int]:
        """Draws a message's source, destination and tag."""
        return *data.draw(st.sampled_from(self.routes)), data.draw(self.tags)

    def receiving(
        self, data: st.DataObject, tags: st.SearchStrategy[int | None]
    ) -> tuple[int, int | None, int | None]:
        """Draws a receive's rank, source and tag."""
        src, rank = data.draw(st.sampled_from(self.routes))
        return rank, src if data.draw(st.booleans()) else None, data.draw(tags)

    def comm(self, rank: int) -> Communicator:
        return self.world.comms[rank]

    def content(self, tag: int) -> np.ndarray:
        """Returns content that no other message has, if the length is not zero."""
        self.began += 1
        memory = np.full(self.sizes[tag], self.began % 251, np.uint8)
        memory[:8] = np.frombuffer(self.began.to_bytes(8, "little"), np.uint8)[: memory.size]
        return memory

    @rule(data=st.data(), count=st.integers(1, 60))
    def send(self, data: st.DataObject, count: int) -> None:
        src, dst, tag = self.sending(data)
        for _ in range(count if self.sizes[tag] < 100 else 1 + count % 8):
            memory = self.content(tag)
            work = self.comm(src).send(memory, dst, tag, async_op=True)
            self.add_message(src, dst, tag, memory, work)

    def add_message(self, src: int, dst: int, tag: int, memory: np.ndarray, work: Any) -> Message:
        message = Message(
            number=self.began, src=src, dst=dst, tag=tag, content=memory.tobytes(), work=work
        )
        self.history.messages.append(message)
        return message

    @rule(data=st.data(), count=st.integers(1, 20))
    def receive(self, data: st.DataObject, count: int) -> None:
        rank, src, tag = self.receiving(data, self.wanted_tags)
        for _ in range(count):
            self.ask(rank, src, tag, self.sizes[tag or 0])

    def ask(self, rank: int, src: int | None, tag: int | None, size: int) -> Receive:
        memory = np.zeros(size, np.uint8)
        work = self.comm(rank).recv(memory, src, tag, async_op=True)
        return self.add_receive(rank, src, tag, memory, work)

    def add_receive(
        self, rank: int, src: int | None, tag: int | None, memory: np.ndarray, work: Any
    ) -> Receive:
        self.began += 1
        receive = Receive(number=self.began, rank=rank, src=src, tag=tag, memory=memory, work=work)
        self.history.receives.append(receive)
        return receive

    @rule(data=st.data(), count=st.integers(0, 12))
    def probe(self, data: st.DataObject, count: int) -> None:
        """Probes, then receives the message that the probe found, with its tag and length."""
        rank, src, tag = self.receiving(data, st.none() | self.tags)
        if tag is not None:
            self.history.asked.add((rank, src, tag))
        found = self.find(rank, src, tag)
        for _ in range(count):
            if found is None:
                return
            self.ask(rank, src, tag, found.nbytes).found = found.source, found.tag
            found = self.find(rank, src, tag)

    def find(self, rank: int, src: int | None, tag: int | None) -> Any:
        if self.history.must_have_come(rank, src, tag):
            found = self.comm(rank).probe(src, tag, END_S)
        else:
            found = self.comm(rank).iprobe(src, tag)
        if found is not None:
            assert src in (None, found.source) and tag in (None, found.tag)
            assert found.nbytes == self.sizes[found.tag]
        return found

    @rule(data=st.data(), sends=st.booleans())
    def make_persistent(self, data: st.DataObject, sends: bool) -> None:
        rank, peer, tag = self.receiving(data, self.wanted_tags)
        if sends:
            rank, peer, tag = self.sending(data)
        memory = np.zeros(self.sizes[tag or 0], np.uint8)
        make = self.comm(rank).send_init if sends else self.comm(rank).recv_init
        request = make(memory, peer, tag)
        self.persistent.append(
            Persistent(request=request, memory=memory, rank=rank, peer=peer, tag=tag, sends=sends)
        )

    @precondition(lambda self: self.persistent)
    @rule(back=st.integers(0, 9), count=st.integers(1, 8))
    def start(self, back: int, count: int) -> None:
        one = last(self.persistent, back)
        for _ in range(count):
            if one.begun is not None and not one.request.test():
                return
            if isinstance(one.begun, Message):
                one.begun.over = True
            elif one.begun is not None:
                one.begun.look()
            self.start_one(one)

    def start_one(self, one: Persistent) -> None:
        if one.sends:
            assert one.peer is not None and one.tag is not None
            one.memory[:] = self.content(one.tag)
            work = one.request.start()
            one.begun = self.add_message(one.rank, one.peer, one.tag, one.memory, work)
        else:
            one.memory[:] = 0
            work = one.request.start()
            one.begun = self.add_receive(one.rank, one.peer, one.tag, one.memory, work)

    @precondition(lambda self: self.history.receives)
    @rule(back=st.integers(0, 60))
    def cancel_receive(self, back: int) -> None:
        receive = last(self.history.receives, back)
        # if this receive has ended, its persistent request may already have begun another receive
        over = receive.cancelled or receive.outcome is not None
        if not over and receive.work.cancel():
            assert receive.found is None
            receive.cancelled = True

    @precondition(lambda self: self.history.messages)
    @rule(back=st.integers(0, 60))
    def cancel_send(self, back: int) -> None:
        message = last(self.history.messages, back)
        if not message.over and message.work.cancel():
            assert not message.withdrawn
            message.withdrawn = True

    @rule()
    def wait_a_little(self) -> None:
        time.sleep(1e-3)

    def teardown(self) -> None:
        if not hasattr(self, "history"):
            return
        try:
            self.finish()
            self.history.check(len(self.hosts))
            self.clear()
        except BaseException:
            self.world.abort()
            raise
        self.worlds[self.hosts] = self.world

    def finish(self) -> None:
        """Waits until no pending receive can still get one of the sent messages.

        On a loaded machine, the threads that move messages may not run during a short pause. So a
        pause without progress is the end only if no message matches a pending receive.
        """
        end = time.monotonic() + END_S
        while self.receives_end_in_a_pause() or self.history.pending() is not None:
            if time.monotonic() > end:
                return  # `check` fails and names the receive and the message

    def receives_end_in_a_pause(self) -> bool:
        paused_at = time.monotonic() + 0.02
        while time.monotonic() < paused_at:
            if any(receive.look() for receive in self.history.receives):
                return True
        return False

    def clear(self) -> None:
        """Receives all remaining messages, so that the next history starts without messages."""
        for receive in self.history.receives:
            if receive.outcome is None and not receive.cancelled:
                assert receive.work.cancel()
        taken = {receive.got for receive in self.history.receives}
        for message in self.history.messages:
            if message.withdrawn:
                continue
            if message not in taken:
                out = np.zeros(len(message.content), np.uint8)
                self.comm(message.dst).recv(out, message.src, message.tag)
                assert out.tobytes() == message.content
            if not message.over:
                message.work.wait(END_S)
        # Exchanges one more message between each pair of ranks. It arrives after all earlier
        # messages, so the probes below would find any message that was not received.
        nothing = np.zeros(0)
        for comm in self.world.comms:
            for dst, other in enumerate(self.world.comms):
                comm.send(nothing, dst, 9, async_op=True)
                other.recv(nothing, comm.rank, 9)
        assert all(comm.iprobe() is None for comm in self.world.comms)


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[type[Matching]]:
    class Bound(Matching):
        layouts = request.param
        worlds: dict[tuple[int, ...], World] = {}  # noqa: RUF012

    yield Bound
    for world in Bound.worlds.values():
        world.close()


on_one_and_on_two_hosts = pytest.mark.parametrize(
    "machine", [ONE_HOST, TWO_HOSTS], indirect=True, ids=["one host", "two hosts"]
)


@on_one_and_on_two_hosts
def test_messages_match_as_mpi_says(machine: type[Matching]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine, settings=settings(max_examples=100, stateful_step_count=25, deadline=None)
    )


@pytest.mark.slow
@on_one_and_on_two_hosts
def test_many_messages_match_as_mpi_says(machine: type[Matching]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine, settings=settings(max_examples=500, stateful_step_count=50, deadline=None)
    )
