"""Over a carrier whose messages end in any order, a group does what the reference executor does."""

from __future__ import annotations

import gc
import os
import secrets
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from message_library import Fabric
from thread_group import Crew, compare
from unisono import algorithms, native
from unisono.algorithms.host_layout import Hosts
from unisono.errors import AbortedError, PeerLostError, UnisonoError, UnsupportedError
from unisono.types import DType, Op

EVERY = [(op, name) for op in Op for name in algorithms.names(op) if op is not Op.BARRIER]
LAYOUTS: list[Hosts] = [((0,), (1,)), ((0, 2), (1, 3)), ((0, 1, 2), (4, 3), (5,))]
UINT8 = list(DType).index(DType.UINT8)


class CarriedCrew(Crew):
    """Ranks on several pretended hosts, with a fabric between them."""

    def __init__(self, hosts: Hosts) -> None:
        self.layout = hosts
        self.fabric = Fabric(seed=len(hosts))
        super().__init__(sum(map(len, hosts)), 0, hosts)

    def make_groups(self, staging_bytes: int) -> list[native.Group]:
        found: dict[int, native.Group] = {}
        cores = native.usable_cores()
        for here in self.layout:
            nonce = secrets.token_bytes(16)
            fd = native.create_segment(len(here), 4, 1 << 18, nonce)
            for rank in here:
                found[rank] = native.Group.of_hosts(
                    os.dup(fd), rank, self.ranks, list(here), nonce, cores,
                    partial(self.fabric.carrier, rank),
                )  # fmt: skip
            os.close(fd)
        return [found[rank] for rank in range(self.ranks)]


@pytest.fixture(scope="module")
def crews() -> Iterator[list[CarriedCrew]]:
    made = [CarriedCrew(hosts) for hosts in LAYOUTS]
    yield made
    for crew in made:
        crew.close()


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_anything(data: st.DataObject, crews: list[CarriedCrew]) -> None:
    op, name = data.draw(st.sampled_from(EVERY))
    crew = data.draw(st.sampled_from(crews))
    try:
        algorithms.build(op, name, ranks=crew.ranks, hosts=crew.hosts)
    except UnsupportedError:
        assume(False)
    root = data.draw(st.integers(0, crew.ranks - 1))
    counts = [data.draw(st.sampled_from([0, 1, 400, 3000]))] * crew.ranks
    compare(
        crew, op, name, counts, root=root, dtype=data.draw(st.sampled_from(list(DType)[:12])),
        block_bytes=data.draw(st.sampled_from([64, 1024, 16384])),
        lead=data.draw(st.integers(0, 3)),
    )  # fmt: skip


class End:
    """Messages of one group."""

    def __init__(self, group: native.Group) -> None:
        self.group = group
        self._messages = native.Messages(group, False)
        self._messages.timeout_s = 20

    def begin(
        self, array: np.ndarray, peer: int, tag: int, *, sends: bool, carried: bool = False
    ) -> native.Request:
        request = self._messages.request(
            sends, array.ctypes.data, array.nbytes, UINT8, peer, tag, array
        )
        self._messages.begin(request, carried)
        return request


def test_messages_come_in_order_however_large(crews: list[CarriedCrew]) -> None:
    one, other = map(End, crews[0].groups)
    sent = [np.full(n, i, np.uint8) for i, n in enumerate([0, 1, 100_000, 10, 5000, 0] * 30)]
    requests = [one.begin(x, 1, 7, sends=True, carried=True) for x in sent]
    for i, x in enumerate(sent):
        out = np.empty_like(x)
        other.begin(out, 0, 7, sends=False).wait()
        assert (out == i).all()
    for request in requests:
        request.wait()


def test_a_peer_is_sent_only_so_many_messages_that_it_does_not_take(
    crews: list[CarriedCrew],
) -> None:
    one, other = map(End, crews[0].groups)
    x = np.zeros(16, np.uint8)
    requests = [one.begin(x, 1, 8, sends=True, carried=True) for _ in range(2000)]
    other.begin(x, 0, 8, sends=False).wait()
    assert sum(request.is_completed() for request in requests) < 1100
    for _ in requests[1:]:
        other.begin(x, 0, 8, sends=False).wait()
    for request in requests:
        request.wait()


def test_what_a_carrier_cannot_bring_is_a_lost_peer() -> None:
    crew = CarriedCrew(((0,), (1,)))
    x = np.zeros(100_000, np.uint8)
    one = End(crew.groups[0])
    sent = one.begin(x, 1, 0, sends=True)
    end = crew.fabric.ends[0, 1]
    with crew.fabric.lock:  # the payload fails on its way
        way = crew.fabric.sends[0, 1, 1]
        end.ended.append((way.pop().ticket, "the cable was pulled"))
    with pytest.raises(PeerLostError, match="rank 1 is gone: the cable was pulled"):
        sent.wait()
    crew.close()


@pytest.mark.parametrize("waits", [True, False])
def test_a_signal_handler_may_close_the_group_that_it_interrupts(*, waits: bool) -> None:
    """It runs in the midst of Python's part of a wire, in the thread that moves the wire."""
    crew = CarriedCrew(((0,), (1,)))
    one = End(crew.groups[0])
    x = np.zeros(100_000, np.uint8)
    request = one.begin(x, 1, 7, sends=False)

    def handler() -> None:
        with pytest.raises(UnisonoError, match="a signal handler cannot use"):
            one.begin(x, 1, 8, sends=True)
        one.group.close()

    crew.fabric.interrupt = handler
    if waits:
        with pytest.raises(AbortedError, match="this communicator is closed"):
            request.wait(20)
    else:
        while crew.fabric.interrupt:
            request.test()
    assert request.test()
    crew.close()


def interrupt_with(crew: CarriedCrew, error: BaseException) -> None:
    """A signal's handler raises it in the midst of the next look."""

    def handler() -> None:
        raise error

    crew.fabric.interrupt = handler


def test_what_a_signal_handler_raises_in_a_carrier_comes_out() -> None:
    crew = CarriedCrew(((0,), (1,)))
    one = End(crew.groups[0])
    x = np.zeros(100, np.uint8)
    request = one.begin(x, 1, 7, sends=False)
    interrupt_with(crew, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        request.wait(20)
    with pytest.raises(AbortedError, match="interrupted by KeyboardInterrupt"):
        one.begin(x, 1, 7, sends=False)
    crew.close()


def test_memory_stays_if_a_signal_handler_raised_amid_a_carrier() -> None:
    """The library may have begun what the carrier has not noted yet."""
    crew = CarriedCrew(((0,), (1,)))
    one = End(crew.groups[0])
    x = np.zeros(100_000, np.uint8)
    sent = one.begin(x, 1, 7, sends=True)
    interrupt_with(crew, TimeoutError("an alarm"))
    with pytest.raises(UnisonoError, match="an alarm"):
        sent.wait(20)
    array = weakref.ref(x)
    crew.close()
    del crew, one, sent, x
    gc.collect()
    assert array() is not None


@pytest.mark.parametrize("lets_go", [True, False])
def test_memory_stays_until_the_carrier_lets_go_of_it(*, lets_go: bool) -> None:
    """A library that cannot take back what it was given uses it until the process ends."""
    gc.collect()  # what earlier tests have left
    before = segments()
    crew = CarriedCrew(((0,), (1,)))
    fabric = crew.fabric
    fabric.lets_go = lets_go
    compare(crew, Op.ALL_REDUCE, "direct", [10_000] * 2, block_bytes=16384)
    mirrors = list(fabric.reached)
    assert mirrors
    fabric.stalled = True
    arrays = send_without_end(crew)
    crew.close()
    del crew
    gc.collect()
    assert [array() is None for array in arrays] == [lets_go] * 2
    assert segments() - before == (0 if lets_go else 2)
    assert lets_go or all(map(mapped, mirrors))


def send_without_end(crew: CarriedCrew) -> list[weakref.ref[np.ndarray]]:
    """Both ends of a message whose payload is on its way when the group is aborted."""
    one, other = map(End, crew.groups)
    x, y = np.zeros(100_000, np.uint8), np.zeros(100_000, np.uint8)
    sent = one.begin(x, 1, 7, sends=True)
    awaited = other.begin(y, 0, 7, sends=False)
    while not crew.fabric.receives[0, 1, 1]:
        assert not awaited._wait_native(0.01)
    for end, request in ((one, sent), (other, awaited)):
        end.group.abort("enough")
        with pytest.raises(AbortedError):
            request.wait()
    return [weakref.ref(x), weakref.ref(y)]


def segments() -> int:
    """How many mappings of groups' memory this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:unisono")


def mapped(memory: tuple[int, int]) -> bool:
    with open("/proc/self/mem", "rb", buffering=0) as whole:
        try:
            return len(os.pread(whole.fileno(), 1, memory[0])) == 1
        except OSError:
            return False
