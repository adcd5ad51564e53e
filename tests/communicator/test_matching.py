"""Which message goes to which receive: random histories of one to six ranks, by MPI's rules."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from ranks import Threads
from unisono import Communicator, Work

# Inside a slot, in the ring of bytes, the last that goes there, the first that is read by the
# receiver, and several chunks of those.
SIZES = (0, 8, 24, 25, 3000, 8192, 8193, 16_384, 16_385, 70_000)
END_S = 20.0


@dataclass(kw_only=True)
class Message:
    number: int
    src: int
    dst: int
    tag: int
    work: Work
    memory: np.ndarray
    withdrawn: bool = False


@dataclass(kw_only=True)
class Receive:
    number: int
    rank: int
    src: int | None
    tag: int | None
    work: Any
    memory: np.ndarray
    cancelled: bool = False
    got: Message | None = None

    def wants(self, message: Message) -> bool:
        return self.src in (None, message.src) and self.tag in (None, message.tag)


@dataclass
class History:
    """What was sent and asked for, in the order in which it began."""

    messages: list[Message] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)

    def settle(self, receive: Receive) -> None:
        """Finds the message that a receive has got, by what is in its memory."""
        source, tag = receive.work.source_rank(), receive.work.tag()
        to_it = [m for m in self.messages if m.dst == receive.rank and m.src == source]
        found = [
            m for m in to_it if m.tag == tag and m.memory.tobytes() == receive.memory.tobytes()
        ]
        taken = {id(r.got) for r in self.receives}
        # Those without a byte look alike: they are told apart by their order, which is what counts.
        receive.got = next((m for m in found if id(m) not in taken and not m.withdrawn), None)
        assert receive.got is not None, f"{receive} has got what nobody sent"
        assert receive.wants(receive.got), f"{receive} has got what it did not ask for"

    def check(self, ranks: int) -> None:
        for rank in range(ranks):
            receives = [r for r in self.receives if r.rank == rank and not r.cancelled]
            messages = [m for m in self.messages if m.dst == rank and not m.withdrawn]
            self._check_order(receives)
            taken = {id(r.got) for r in receives}
            for receive in (r for r in receives if r.got is None):
                left = [m for m in messages if id(m) not in taken and receive.wants(m)]
                assert not left, f"{receive} waits, and {left[0]} was there for it"

    def _check_order(self, receives: list[Receive]) -> None:
        """MPI 4.1, section 3.5: of two messages of one rank that a receive asks for, it gets the
        first; of two receives that ask for a message, the first gets it."""
        for receive in receives:
            if receive.got is None:
                continue
            for message in self.messages:
                if message.dst != receive.rank or message.src != receive.got.src:
                    continue
                if message.number > receive.got.number or message.withdrawn:
                    continue
                if message is receive.got or not receive.wants(message):
                    continue
                taker = next((r for r in receives if r.got is message), None)
                assert taker is not None and taker.number < receive.number, (
                    f"{receive} has overtaken {message}"
                )


class Matching(RuleBasedStateMachine):
    """Ranks that send, ask, take back and look, in any order."""

    worlds: dict[int, Threads]

    @initialize(ranks=st.integers(1, 6), mixed=st.booleans(), size=st.sampled_from(SIZES))
    def join(self, ranks: int, mixed: bool, size: int) -> None:
        if ranks not in self.worlds:
            self.worlds[ranks] = Threads(ranks, timeout_s=END_S)
        self.world = self.worlds[ranks]
        self.world.healthy = False  # until the end is reached
        self.history = History()
        self.began = 0
        self.ranks = ranks
        # A receive of any tag has to know the length: then all are of one.
        self.sizes = SIZES if mixed else (size,) * 3
        self.mixed = mixed

    def comm(self, rank: int) -> Communicator:
        return self.world.comms[rank]

    @rule(data=st.data(), count=st.integers(1, 60))
    def send(self, data: st.DataObject, count: int) -> None:
        src, dst = (data.draw(st.integers(0, self.ranks - 1)) for _ in range(2))
        tag = data.draw(st.integers(0, len(self.sizes) - 1))
        for _ in range(count if self.sizes[tag] < 100 else 1 + count % 4):
            self.began += 1
            memory = np.full(self.sizes[tag], self.began % 251, np.uint8)
            memory[:8] = np.frombuffer(self.began.to_bytes(8, "little"), np.uint8)[: memory.size]
            work = self.comm(src).send(memory, dst, tag, async_op=True)
            self.history.messages.append(
                Message(number=self.began, src=src, dst=dst, tag=tag, work=work, memory=memory)
            )

    @rule(data=st.data(), count=st.integers(1, 20))
    def receive(self, data: st.DataObject, count: int) -> None:
        rank = data.draw(st.integers(0, self.ranks - 1))
        src = data.draw(st.none() | st.integers(0, self.ranks - 1))
        tags = st.integers(0, len(self.sizes) - 1)
        tag = data.draw(tags if self.mixed else st.none() | tags)
        for _ in range(count):
            self.ask(rank, src, tag)

    def ask(self, rank: int, src: int | None, tag: int | None) -> None:
        self.began += 1
        memory = np.zeros(self.sizes[tag or 0], np.uint8)
        work = self.comm(rank).recv(memory, src, tag, async_op=True)
        self.history.receives.append(
            Receive(number=self.began, rank=rank, src=src, tag=tag, work=work, memory=memory)
        )

    @rule(data=st.data())
    def cancel_receive(self, data: st.DataObject) -> None:
        if not self.history.receives:
            return
        receive = data.draw(st.sampled_from(self.history.receives))
        if receive.work.cancel():
            assert not receive.cancelled and receive.got is None
            receive.cancelled = True

    @rule(data=st.data())
    def cancel_send(self, data: st.DataObject) -> None:
        if not self.history.messages:
            return
        message = data.draw(st.sampled_from(self.history.messages))
        if message.work.cancel():
            assert not message.withdrawn
            message.withdrawn = True

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, self.ranks - 1))
        found = self.comm(rank).iprobe()
        if found is not None:
            assert found.nbytes == self.sizes[found.tag]

    @rule()
    def wait_a_little(self) -> None:
        time.sleep(1e-3)

    def teardown(self) -> None:
        if not hasattr(self, "history"):
            return
        self.finish()
        self.history.check(self.ranks)
        self.clear()
        self.world.healthy = True

    def finish(self) -> None:
        """Until no receive has anything to take any more."""
        quiet_since = time.monotonic()
        while time.monotonic() < quiet_since + 0.02:
            for receive in self.history.receives:
                if receive.got is None and not receive.cancelled and receive.work.test():
                    receive.work.wait()
                    self.history.settle(receive)
                    quiet_since = time.monotonic()
        for message in self.history.messages:
            if any(receive.got is message for receive in self.history.receives):
                message.work.wait(END_S)

    def clear(self) -> None:
        """Takes what nobody asked for, so that nothing is left for the next history."""
        for receive in self.history.receives:
            if receive.got is None and not receive.cancelled:
                assert receive.work.cancel()
                receive.cancelled = True
        taken = {id(receive.got) for receive in self.history.receives}
        for message in self.history.messages:
            if message.withdrawn or id(message) in taken:
                continue
            out = np.zeros_like(message.memory)
            self.comm(message.dst).recv(out, message.src, message.tag)
            np.testing.assert_array_equal(out, message.memory)
            message.work.wait(END_S)
        for comm in self.world.comms:
            assert comm.iprobe() is None


@pytest.fixture
def machine() -> Iterator[type[Matching]]:
    class Bound(Matching):
        worlds: dict[int, Threads] = {}  # noqa: RUF012

    yield Bound
    for world in Bound.worlds.values():
        world.close()


def test_messages_match_as_mpi_says(machine: type[Matching]) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine, settings=settings(max_examples=25, stateful_step_count=20, deadline=None)
    )
