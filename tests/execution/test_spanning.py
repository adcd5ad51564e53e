"""A group on several hosts has the same result bits as the reference executor.

The hosts are segments of one process, which are connected only by TCP over loopback.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from thread_group import ThreadGroup, compare
from unisono import algorithms, native
from unisono.algorithms.host_layout import Hosts
from unisono.errors import UnsupportedError
from unisono.types import DType, Op, ReduceOp

EVERY = [(op, name) for op in Op for name in algorithms.names(op) if op is not Op.BARRIER]
DEPTH, AREA_BYTES = 4, 1 << 18


def connected() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialed = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    for end in (dialed, accepted):
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return dialed.detach(), accepted.detach()


class SpanningThreadGroup(ThreadGroup):
    """Ranks on several hosts; `streams` is the number of connections between two ranks of different
    hosts.
    """

    def __init__(self, hosts: Hosts, streams: int = 1) -> None:
        self.streams = streams
        self.layout = hosts
        super().__init__(sum(len(here) for here in hosts), 0, hosts)

    def make_groups(self, staging_bytes: int) -> list[native.Group]:
        found: dict[int, native.Group] = {}
        host = {rank: here for here in self.layout for rank in here}
        for here in self.layout:
            nonce = secrets.token_bytes(16)
            fd = native.create_segment(len(here), DEPTH, AREA_BYTES, nonce)
            for rank in here:
                found[rank] = native.Group.of_hosts(
                    os.dup(fd), rank, self.ranks, list(here), nonce, native.usable_cores()
                )
            os.close(fd)
        for a in range(self.ranks):
            for b in range(a):
                if host[a] != host[b]:
                    self.connect(found, a, b)
        return [found[rank] for rank in range(self.ranks)]

    def connect(self, groups: dict[int, native.Group], a: int, b: int) -> None:
        for kind in (0, 1):
            for stream in range(self.streams):
                one, other = connected()
                groups[a].attach(b, kind, stream, self.streams, one)
                groups[b].attach(a, kind, stream, self.streams, other)


LAYOUTS: list[Hosts] = [
    ((0,), (1,)),
    ((0, 1), (2,)),
    ((0, 2), (1, 3)),
    ((0,), (1,), (2,), (3,)),
    ((4, 0), (1, 2, 3)),
    ((0, 1, 2, 3), (4, 5, 6), (7,)),
]


@pytest.fixture(scope="module", params=[1, 3], ids=["one stream", "three streams"])
def groups(request: pytest.FixtureRequest) -> Iterator[list[SpanningThreadGroup]]:
    made = [SpanningThreadGroup(hosts, request.param) for hosts in LAYOUTS]
    yield made
    for group in made:
        group.close()


def serves(group: SpanningThreadGroup, op: Op, name: str) -> bool:
    """Returns True if an algorithm supports these hosts."""
    try:
        algorithms.build(op, name, ranks=group.ranks, hosts=group.hosts)
    except UnsupportedError:
        return False
    return True


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_anything(data: st.DataObject, groups: list[SpanningThreadGroup]) -> None:
    op, name = data.draw(st.sampled_from(EVERY))
    group = data.draw(st.sampled_from(groups))
    assume(serves(group, op, name))
    root = data.draw(st.integers(0, group.ranks - 1))
    dtype = data.draw(st.sampled_from(DType))
    reductions = [r for r in ReduceOp if dtype.supports(r) and not (op.scans and r is ReduceOp.AVG)]
    plans = group.plans(op, name, root, None)
    in_place = all(plan.in_place for plan in plans) and data.draw(st.booleans())
    length = st.integers(0, 400)
    if plans[0].uniform or (in_place and op is Op.ALL_TO_ALL):
        counts = [data.draw(length)] * group.ranks
    else:
        counts = data.draw(st.lists(length, min_size=group.ranks, max_size=group.ranks))
    compare(
        group, op, name, counts, root=root, dtype=dtype,
        reduction=data.draw(st.sampled_from(reductions)),
        block_bytes=data.draw(st.sampled_from([64, 128, 1024, 4096])), in_place=in_place,
        seed=data.draw(length), offset=data.draw(st.sampled_from([0, 16, 1, 63])),
        lead=data.draw(st.integers(0, 3)),
    )  # fmt: skip


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_every_algorithm_over_many_blocks(
    op: Op, name: str, groups: list[SpanningThreadGroup]
) -> None:
    for group in (group for group in groups[1:3] if serves(group, op, name)):
        compare(group, op, name, [4001] * group.ranks, root=group.ranks - 1, block_bytes=4096)
        compare(group, op, name, [2001] * group.ranks, root=0, block_bytes=256, lead=2)


def test_blocks_of_the_size_that_is_chosen(groups: list[SpanningThreadGroup]) -> None:
    for name in ("direct", "ring", "recursive_doubling"):
        compare(groups[2], Op.ALL_REDUCE, name, [500_003] * 4, in_place=True)
