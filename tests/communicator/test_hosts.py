"""A communicator that is configured for ranks on several hosts: its choices and results.

All ranks run on one host, but exchange the same data in the same order as on several hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranks import Threads
from unisono import Communicator, config
from unisono.algorithms.host_layout import Hosts
from unisono.bootstrap.group_config import GroupConfig, JoinedGroup
from unisono.bootstrap.group_network import GroupNetwork, TransportKind
from unisono.communicator.engine import Engine
from unisono.selection.network_cost_model import Demands, candidates
from unisono.selection.rules import BUILT_IN
from unisono.selection.selection_table import BUILT_IN_SOURCE, MODEL_SOURCE, SelectionTable
from unisono.types import Op

World = Callable[[int], Threads]

LAYOUTS: tuple[Hosts, ...] = (((0,), (1,), (2,), (3,)), ((0, 2), (1, 3)), ((0, 1, 3), (2,)))


class NoNetwork:
    """A network without connections, since all ranks run on one host."""

    def form(self, meeting: GroupConfig, members: Sequence[int]) -> JoinedGroup:
        raise NotImplementedError

    def reach(self, name: bytes, peers: Iterable[int], transport: TransportKind) -> None:
        pass

    def leave(self, name: bytes) -> None:
        pass


def told(comm: Communicator, hosts: Hosts, *, reproducible: bool = False) -> Communicator:
    """Returns a communicator of the same ranks that is configured for these hosts."""
    child = comm.split(0)
    assert child is not None
    settings = config.settings({"UNISONO_REPRODUCIBLE": "1"} if reproducible else {})
    span = GroupNetwork(NoNetwork(), b"", child.rank, tuple(range(child.size)), hosts)
    child._engine = Engine(
        child._group, child.rank, child.size, settings, SelectionTable(cores=2), span
    )
    child._quick = child._engine.quick
    return child


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_every_operation_of_any_length(hosts: Hosts, threads: World) -> None:
    def body(comm: Communicator) -> None:
        with told(comm, hosts) as child:
            for length in (0, 1, 2, 5000, 100_000):
                exercise(child, length)
            child.barrier()

    threads(4).run(body)


def exercise(comm: Communicator, length: int) -> None:
    n, rank = comm.size, comm.rank
    own = np.arange(length, dtype=np.int64) * (rank + 1)
    total = np.arange(length, dtype=np.int64) * (n * (n + 1) // 2)
    assert np.array_equal(comm.all_reduce(own.copy()), total)
    assert np.array_equal(comm.broadcast(own.copy(), root=2), np.arange(length) * 3)
    reduced = comm.reduce(own.copy(), root=1)
    assert rank != 1 or np.array_equal(reduced, total)
    scanned = np.arange(length) * ((rank + 1) * (rank + 2) // 2)
    assert np.array_equal(comm.scan(own.copy()), scanned)
    before = comm.exscan(own.copy())
    assert rank == 0 or np.array_equal(before, scanned - own)
    gathered = np.concatenate([np.arange(length) * (r + 1) for r in range(n)])
    assert np.array_equal(comm.all_gather(own), gathered)
    at_root = comm.gather(own, root=3)
    assert rank != 3 or np.array_equal(at_root, gathered)
    pieces = np.concatenate([own + 7 * to for to in range(n)])
    assert np.array_equal(comm.reduce_scatter(pieces.copy()), total + 7 * n * rank)
    exchanged = np.concatenate([np.arange(length) * (r + 1) + 7 * rank for r in range(n)])
    assert np.array_equal(comm.all_to_all(pieces), exchanged)
    part = comm.scatter(pieces if rank == 0 else None, np.empty_like(own), root=0)
    assert np.array_equal(part, np.arange(length) + 7 * rank)


def test_a_barrier_holds_all_until_the_last(threads: World) -> None:
    arrived: list[int] = []

    def body(comm: Communicator) -> None:
        with told(comm, LAYOUTS[1]) as child:
            for late in range(4):
                if child.rank == late:
                    time.sleep(0.02)
                    arrived.append(late)
                child.barrier()
                assert arrived[-1] == late
                child.barrier()

    threads(4).run(body)


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_reproducible_bits_do_not_depend_on_hosts(hosts: Hosts, threads: World) -> None:
    rng = np.random.default_rng(5)
    scales = 10.0 ** rng.integers(-6, 6, (4, 1))
    values = (rng.standard_normal((4, 3000)) * scales).astype(np.float32)
    want = values[0].copy()
    for other in values[1:]:
        want += other

    def body(comm: Communicator) -> tuple[bytes, bytes, str]:
        with told(comm, hosts, reproducible=True) as child:
            reduced = child.all_reduce(values[child.rank].copy())
            at_root = child.reduce(values[child.rank].copy(), root=0)
            algorithm = child.explain("all_reduce", 12_000).algorithm
            child.barrier()
            return reduced.tobytes(), at_root.tobytes(), algorithm

    found = threads(4).run(body)
    assert {reduced for reduced, _, _ in found} == {want.tobytes()} == {found[0][1]}
    assert {algorithm for _, _, algorithm in found} == {"rank_order"}


def test_explain_names_the_choice_for_several_hosts(threads: World) -> None:
    def body(comm: Communicator) -> str:
        with told(comm, LAYOUTS[0]) as child:
            assert child.hosts == LAYOUTS[0]
            assert child.explain("all_reduce", 8).algorithm == "leaders"
            found = child.explain("all_reduce", 1 << 20)
            child.barrier()
            return str(found)

    text = threads(4).run(body)[0]
    assert text.startswith(
        "all_reduce of 1048576 bytes on 4 ranks of 4 hosts: by_host:ring (lowest"
    )
    assert MODEL_SOURCE in text and "runner-up: by_host:" in text


@given(st.sampled_from(Op), st.integers(0, 1 << 30), st.sampled_from(LAYOUTS), st.booleans())
def test_the_cost_model_chooses_for_several_hosts(
    op: Op, nbytes: int, hosts: Hosts, in_rank_order: bool
) -> None:
    demands = Demands(in_rank_order=in_rank_order)
    found = SelectionTable(cores=2).choose(op, nbytes, ranks=4, hosts=hosts, demands=demands)
    assert found.source == MODEL_SOURCE
    assert found.rule.algorithm in candidates(op, demands)
    assert found.rule.serves(op, nbytes, ranks=4, hosts=len(hosts))
    alone = SelectionTable(cores=2).choose(
        op, nbytes, ranks=4, hosts=((0, 1, 2, 3),), demands=demands
    )
    assert alone == SelectionTable(cores=2).choose(op, nbytes, ranks=4)
    assert alone.source == BUILT_IN_SOURCE
    assert alone.rule == BUILT_IN.choose(op, nbytes, ranks=4)


def test_narrow_floats_are_not_widened_between_hosts_if_that_is_slower() -> None:
    """Tests the choice for 16-bit floats. An algorithm that nests two reductions would pass float32
    sums from one to the other, which would double the bytes between hosts. So such an algorithm
    must not be chosen.
    """
    hosts: Hosts = ((0, 1), (2, 3))
    wide, narrow = (
        SelectionTable(cores=2).choose(
            Op.ALL_REDUCE, 8 << 20, ranks=4, hosts=hosts, demands=Demands(widening=widening)
        )
        for widening in (1, 2)
    )
    assert (wide.rule.algorithm, narrow.rule.algorithm) == ("by_host", "rank_order")
