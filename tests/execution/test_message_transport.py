"""A group over a message library gives the results of the reference executor.

The library completes messages in random order.
"""

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
from thread_group import ThreadGroup, compare
from unisono import algorithms, native
from unisono.algorithms.host_layout import Hosts
from unisono.errors import AbortedError, PeerLostError, UnisonoError, UnsupportedError
from unisono.types import DType, Op

EVERY = [(op, name) for op in Op for name in algorithms.names(op) if op is not Op.BARRIER]
LAYOUTS: list[Hosts] = [((0,), (1,)), ((0, 2), (1, 3)), ((0, 1, 2), (4, 3), (5,))]
UINT8 = list(DType).index(DType.UINT8)


class LibraryThreadGroup(ThreadGroup):
    """Ranks on several simulated hosts, connected by a simulated fabric."""

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
                    partial(self.fabric.library, rank),
                )  # fmt: skip
            os.close(fd)
        return [found[rank] for rank in range(self.ranks)]


@pytest.fixture(scope="module")
def groups() -> Iterator[list[LibraryThreadGroup]]:
    made = [LibraryThreadGroup(hosts) for hosts in LAYOUTS]
    yield made
    for group in made:
        group.close()


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_anything(data: st.DataObject, groups: list[LibraryThreadGroup]) -> None:
    op, name = data.draw(st.sampled_from(EVERY))
    group = data.draw(st.sampled_from(groups))
    try:
        algorithms.build(op, name, ranks=group.ranks, hosts=group.hosts)
    except UnsupportedError:
        assume(False)
    root = data.draw(st.integers(0, group.ranks - 1))
    counts = [data.draw(st.sampled_from([0, 1, 400, 3000]))] * group.ranks
    compare(
        group, op, name, counts, root=root, dtype=data.draw(st.sampled_from(list(DType)[:12])),
        block_bytes=data.draw(st.sampled_from([64, 1024, 16384])),
        lead=data.draw(st.integers(0, 3)),
    )  # fmt: skip


class End:
    """One rank's end of the group, which sends and receives messages."""

    def __init__(self, group: native.Group) -> None:
        self.group = group
        self._messages = native.Messages(group, False)
        self._messages.timeout_s = 20

    def begin(
        self, array: np.ndarray, peer: int, tag: int, *, sends: bool, in_background: bool = False
    ) -> native.Request:
        request = self._messages.request(
            sends, array.ctypes.data, array.nbytes, UINT8, peer, tag, array
        )
        self._messages.begin(request, in_background)
        return request


def test_messages_of_all_sizes_keep_their_order(groups: list[LibraryThreadGroup]) -> None:
    one, other = map(End, groups[0].groups)
    sent = [np.full(n, i, np.uint8) for i, n in enumerate([0, 1, 100_000, 10, 5000, 0] * 30)]
    requests = [one.begin(x, 1, 7, sends=True, in_background=True) for x in sent]
    for i, x in enumerate(sent):
        out = np.empty_like(x)
        other.begin(out, 0, 7, sends=False).wait()
        assert (out == i).all()
    for request in requests:
        request.wait()


def test_unreceived_messages_are_limited(
    groups: list[LibraryThreadGroup],
) -> None:
    one, other = map(End, groups[0].groups)
    x = np.zeros(16, np.uint8)
    requests = [one.begin(x, 1, 8, sends=True, in_background=True) for _ in range(2000)]
    other.begin(x, 0, 8, sends=False).wait()
    assert sum(request.is_completed() for request in requests) < 1100
    for _ in requests[1:]:
        other.begin(x, 0, 8, sends=False).wait()
    for request in requests:
        request.wait()


def test_a_failed_transfer_names_the_lost_peer() -> None:
    group = LibraryThreadGroup(((0,), (1,)))
    x = np.zeros(100_000, np.uint8)
    one = End(group.groups[0])
    sent = one.begin(x, 1, 0, sends=True)
    end = group.fabric.ends[0, 1]
    with group.fabric.lock:  # makes the payload's transfer fail
        way = group.fabric.sends[0, 1, 1]
        end.ended.append((way.pop().ticket, "the cable was pulled"))
    with pytest.raises(PeerLostError, match="rank 1 is gone: the cable was pulled"):
        sent.wait()
    group.close()


@pytest.mark.parametrize("waits", [True, False])
def test_a_signal_handler_may_close_the_group_that_it_interrupts(*, waits: bool) -> None:
    """Tests that a signal handler may close the group. The handler interrupts the thread that
    polls, in a call to the Python message library.
    """
    group = LibraryThreadGroup(((0,), (1,)))
    one = End(group.groups[0])
    x = np.zeros(100_000, np.uint8)
    request = one.begin(x, 1, 7, sends=False)

    def handler() -> None:
        with pytest.raises(UnisonoError, match="a signal handler cannot use"):
            one.begin(x, 1, 8, sends=True)
        one.group.close()

    group.fabric.interrupt = handler
    if waits:
        with pytest.raises(AbortedError, match="this communicator is closed"):
            request.wait(20)
    else:
        while group.fabric.interrupt:
            request.test()
    assert request.test()
    group.close()


def interrupt_with(group: LibraryThreadGroup, error: BaseException) -> None:
    """Makes a signal handler raise `error` during the next poll of the library."""

    def handler() -> None:
        raise error

    group.fabric.interrupt = handler


def test_an_exception_of_a_signal_handler_is_raised() -> None:
    group = LibraryThreadGroup(((0,), (1,)))
    one = End(group.groups[0])
    x = np.zeros(100, np.uint8)
    request = one.begin(x, 1, 7, sends=False)
    interrupt_with(group, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        request.wait(20)
    with pytest.raises(AbortedError, match="interrupted by KeyboardInterrupt"):
        one.begin(x, 1, 7, sends=False)
    group.close()


def test_memory_is_kept_after_a_signal_handler_raised() -> None:
    """Raises in a signal handler at a time when the library may have begun a transfer that Python
    has not recorded. The array must stay in memory.
    """
    group = LibraryThreadGroup(((0,), (1,)))
    one = End(group.groups[0])
    x = np.zeros(100_000, np.uint8)
    sent = one.begin(x, 1, 7, sends=True)
    interrupt_with(group, TimeoutError("an alarm"))
    with pytest.raises(UnisonoError, match="an alarm"):
        sent.wait(20)
    array = weakref.ref(x)
    group.close()
    del group, one, sent, x
    gc.collect()
    assert array() is not None


@pytest.mark.parametrize("releases", [True, False])
def test_memory_is_kept_until_the_library_releases_it(*, releases: bool) -> None:
    """Aborts a transfer. If the library cannot release the transfer's memory, the memory must stay
    valid; otherwise it must be freed.
    """
    gc.collect()  # frees objects of earlier tests
    before = segments()
    group = LibraryThreadGroup(((0,), (1,)))
    fabric = group.fabric
    fabric.releases = releases
    compare(group, Op.ALL_REDUCE, "direct", [10_000] * 2, block_bytes=16384)
    mirrors = list(fabric.reached)
    assert mirrors
    fabric.stalled = True
    arrays = send_without_end(group)
    group.close()
    del group
    gc.collect()
    assert [array() is None for array in arrays] == [releases] * 2
    assert segments() - before == (0 if releases else 2)
    assert releases or all(map(mapped, mirrors))


def send_without_end(group: LibraryThreadGroup) -> list[weakref.ref[np.ndarray]]:
    """Aborts the group while a payload is in flight. Returns weak references to the memory of both
    ranks.
    """
    one, other = map(End, group.groups)
    x, y = np.zeros(100_000, np.uint8), np.zeros(100_000, np.uint8)
    sent = one.begin(x, 1, 7, sends=True)
    awaited = other.begin(y, 0, 7, sends=False)
    while not group.fabric.receives[0, 1, 1]:
        assert not awaited._wait_native(0.01)
    for end, request in ((one, sent), (other, awaited)):
        end.group.abort("enough")
        with pytest.raises(AbortedError):
            request.wait()
    return [weakref.ref(x), weakref.ref(y)]


@pytest.mark.parametrize("releases", [True, False])
def test_a_receive_under_way_keeps_its_array_when_its_rank_leaves(*, releases: bool) -> None:
    gc.collect()
    group = LibraryThreadGroup(((0,), (1,)))
    group.fabric.releases = releases
    group.fabric.stalled = True
    one, other = map(End, group.groups)
    x, y = np.zeros(100_000, np.uint8), np.zeros(100_000, np.uint8)
    sent = one.begin(x, 1, 7, sends=True)
    awaited = other.begin(y, 0, 7, sends=False)
    while not group.fabric.receives[0, 1, 1]:
        assert not awaited._wait_native(0.01)
    array = weakref.ref(y)
    other.group.close()
    with pytest.raises(AbortedError, match="closed"):
        awaited.wait()
    with pytest.raises(PeerLostError, match="rank 1 left the group"):
        sent.wait()
    del awaited, other, y
    group.close()
    del group, one, sent, x
    gc.collect()
    assert (array() is None) is releases


def segments() -> int:
    """Returns the number of group segments that are mapped in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:unisono")


def mapped(memory: tuple[int, int]) -> bool:
    with open("/proc/self/mem", "rb", buffering=0) as whole:
        try:
            return len(os.pread(whole.fileno(), 1, memory[0])) == 1
        except OSError:
            return False
