"""The backend `unisono` of `ray.util.collective`: all calls, on arrays of NumPy and torch."""

from __future__ import annotations

import logging
import os

import numpy as np
import pytest

pytest.importorskip("ray")

import ray
from ray.util import collective
from ray.util.collective import types

from unisono.integrations.ray_collective import register

pytestmark = pytest.mark.torch
RANKS = 3


class Worker:
    """One rank."""

    def __init__(self, rank, kind):
        self.rank = rank
        self.kind = kind

    def array(self, *values):
        """Returns an array of these values, of the kind of this rank."""
        if self.kind == "numpy":
            return np.array(values, np.float32)
        import torch

        return torch.tensor(values, dtype=torch.float32)

    def calls(self, group):
        """Returns the results of all calls of a group."""
        rank, size = self.rank, RANKS
        found = {}
        for name in ("SUM", "PRODUCT", "MIN", "MAX"):
            found[name] = self.array(rank + 1, 2)
            collective.allreduce(found[name], group, getattr(types.ReduceOp, name))
        found["reduce"] = self.array(rank, 1)
        collective.reduce(found["reduce"], size - 1, group)
        found["broadcast"] = self.array(rank, 7)
        collective.broadcast(found["broadcast"], 1, group)
        gathered = [self.array(-1, -1) for _ in range(size)]
        collective.allgather(gathered, self.array(rank, 5), group)
        found["allgather"] = [each[0] for each in gathered]
        found["reducescatter"] = self.array(0, 0)
        pieces = [self.array(rank + 10 * piece, 1) for piece in range(size)]
        collective.reducescatter(found["reducescatter"], pieces, group)
        found["ring"] = self.array(rank, 0)
        received = self.array(-1, -1)
        if rank == 0:
            collective.send(found["ring"], 1, group)
            collective.recv(received, size - 1, group)
        else:
            collective.recv(received, rank - 1, group)
            collective.send(found["ring"], (rank + 1) % size, group)
        found["ring"] = received
        collective.barrier(group)
        return {name: [float(value) for value in array] for name, array in found.items()}

    def joins(self, rank, size, group, hosts=1):
        """Joins a group without the program's help. The ranks act as ranks of several hosts."""
        self.rank = rank
        os.environ["UNISONO_HOST_ID"] = f"host{rank % hosts}"
        os.environ["UNISONO_INTERFACE"] = "=lo"
        collective.init_collective_group(size, rank, "unisono", group)

    def waits(self, group):
        """Returns the name of the error of a call that a lost rank does not make."""
        try:
            collective.allreduce(self.array(1.0), group)
        except RuntimeError as error:
            return type(error).__name__
        return "no error"

    def leaves(self, group):
        """Leaves a group."""
        collective.destroy_collective_group(group)

    def refused(self, group):
        """Returns the error of a call with two arrays of one rank."""
        handle = collective.collective.get_group_handle(group)
        with pytest.raises(ValueError, match="expected one array per rank, not 2") as found:
            handle.allreduce([self.array(1), self.array(1)], types.AllReduceOptions())
        return str(found.value)


def expected(rank):
    """Returns the results of `Worker.calls` on a rank, in closed form."""
    total = RANKS * (RANKS - 1) / 2
    return {
        "SUM": [total + RANKS, 2.0 * RANKS],
        "PRODUCT": [6.0, 8.0],
        "MIN": [1.0, 2.0],
        "MAX": [float(RANKS), 2.0],
        "reduce": [total, float(RANKS)] if rank == RANKS - 1 else [float(rank), 1.0],
        "broadcast": [1.0, 7.0],
        "allgather": [0.0, 1.0, 2.0],
        "reducescatter": [total + 10.0 * RANKS * rank, float(RANKS)],
        "ring": [float((rank - 1) % RANKS), 0.0],
    }


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        num_cpus=2 * RANKS, include_dashboard=False, logging_level=logging.ERROR,
        log_to_driver=False, runtime_env={"worker_process_setup_hook": register},
    )  # fmt: skip
    register()
    register()  # does nothing
    yield
    ray.shutdown()


@pytest.fixture
def workers(cluster):
    kinds = ("numpy", "torch", "numpy")
    made = [ray.remote(num_cpus=1)(Worker).remote(rank, kinds[rank]) for rank in range(RANKS)]
    yield made
    for each in made:
        ray.kill(each)


@pytest.mark.timeout(300)
def test_all_calls_of_a_declared_group(workers):
    collective.create_collective_group(workers, RANKS, [0, 1, 2], "unisono", "declared")
    found = ray.get([worker.calls.remote("declared") for worker in workers])
    assert found == [expected(rank) for rank in range(RANKS)]
    texts = ray.get([worker.refused.remote("declared") for worker in workers])
    assert all("unisono has no *_multigpu calls" in text for text in texts)


@pytest.mark.timeout(300)
def test_groups_of_one_name_follow_each_other_in_another_order(workers):
    for order in ([0, 1, 2], [2, 0, 1]):
        ordered = [workers[place] for place in order]
        ray.get([each.joins.remote(rank, RANKS, "own") for rank, each in enumerate(ordered)])
        found = ray.get([each.calls.remote("own") for each in ordered])
        assert found == [expected(rank) for rank in range(RANKS)]
        ray.get([each.leaves.remote("own") for each in ordered])


@pytest.mark.timeout(300)
def test_two_groups_at_once(workers):
    for group in ("first", "second"):
        ray.get([each.joins.remote(rank, RANKS, group) for rank, each in enumerate(workers)])
    for group in ("second", "first"):
        found = ray.get([each.calls.remote(group) for each in workers])
        assert found == [expected(rank) for rank in range(RANKS)]


@pytest.mark.timeout(300)
def test_ranks_of_several_hosts(workers):
    ray.get([each.joins.remote(rank, RANKS, "hosts", 2) for rank, each in enumerate(workers)])
    found = ray.get([worker.calls.remote("hosts") for worker in workers])
    assert found == [expected(rank) for rank in range(RANKS)]


@pytest.mark.timeout(300)
def test_a_lost_actor_ends_the_calls_of_the_others(workers):
    ray.get([each.joins.remote(rank, RANKS, "lost") for rank, each in enumerate(workers)])
    calls = [worker.waits.remote("lost") for worker in workers[:2]]
    ray.kill(workers[2])
    assert ray.get(calls) == ["PeerLostError"] * 2
