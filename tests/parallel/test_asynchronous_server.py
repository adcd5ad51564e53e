"""The parameter server with late, repeated and asynchronous pushes, and workers that finish."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from connection_managers import wait_until  # noqa: E402
from parallel.served_training import (  # noqa: E402
    RANGE_BYTES,
    Mixed,
    bits_of,
    identity,
    set_gradients,
    sgd,
    train_steps,
)
from ranks import Threads  # noqa: E402
from time_limits import limit_s  # noqa: E402
from unisono import CollectiveTimeoutError, Communicator  # noqa: E402
from unisono.parallel import ParameterServer  # noqa: E402
from unisono.parallel.parameter_server.server_messages import (  # noqa: E402
    Push,
    head_bytes,
    write_head,
)

pytestmark = pytest.mark.torch


def plain_sgd(params: Any) -> Any:
    """Makes an optimizer whose steps subtract the gradient."""
    return torch.optim.SGD(params, 1.0)


def test_a_repeated_push_changes_nothing_and_is_answered(
    threads: Callable[[int], Threads],
) -> None:
    def check(comm: Communicator) -> Any:
        model = Mixed()
        options: dict[str, Any] = {"servers": 2, "range_bytes": RANGE_BYTES}
        with ParameterServer(model, sgd, comm=comm, **options) as ps:
            set_gradients(model, comm.rank, 0)
            ps.step()
            set_gradients(model, comm.rank, 1)
            ps.step()
            expected = [each.detach().clone() for each in model.parameters()]
            if comm.rank == 1:
                for old in (1, 0, 1):
                    _push_again(ps, model, old)
                    for mine, theirs in zip(model.parameters(), expected, strict=True):
                        assert torch.equal(mine, theirs)
            set_gradients(model, comm.rank, 2)
            ps.step()
        stats = ps.stats()
        return [bits_of(each) for each in model.parameters()], stats

    def plainly(comm: Communicator) -> Any:
        model = Mixed()
        options: dict[str, Any] = {"servers": 2, "range_bytes": RANGE_BYTES}
        with ParameterServer(model, sgd, comm=comm, **options) as ps:
            train_steps(ps, model, comm.rank, 3)
        return [bits_of(each) for each in model.parameters()]

    found, expected = threads(3).run(check), threads(3).run(plainly)
    assert [bits for bits, _ in found] == expected
    repeats = [stats.repeats for _, stats in found]
    ranges = [stats.updates // 3 for _, stats in found]
    assert repeats == [3 * count for count in ranges]
    assert sum(ranges) > 2


def _push_again(ps: ParameterServer, model: nn.Module, step: int) -> None:
    """Sends the message of an earlier step again, with different gradients."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 99.0)
    used = ps._model.pack_gradients()
    ps._group.exchange.exchange(Push(step, used), 20.0)
    ps._model.unpack_values()


def test_a_repeated_push_before_the_first_is_applied_does_not_replace_it(
    threads: Callable[[int], Threads],
) -> None:
    entered = threading.Event()

    def check(comm: Communicator) -> Any:
        model = nn.Linear(40, 1, bias=False)
        nn.init.zeros_(model.weight)
        with ParameterServer(model, identity, comm=comm, range_bytes=64) as ps:
            if comm.rank == 1:
                entered.wait(limit_s(20))
            model.weight.grad = torch.full((1, 40), 1.0 + comm.rank)
            if comm.rank == 0:
                _begin_twice(ps, model)
                entered.set()
            ps.step()
        return model.weight.detach().tolist()

    assert threads(2).run(check) == [[[1.5] * 40]] * 2


def _begin_twice(ps: ParameterServer, model: nn.Linear) -> None:
    """Sends all messages of step 0 twice, with different gradients, before a server replies."""
    exchange = ps._group.exchange
    assert model.weight.grad is not None
    right = model.weight.grad.clone()
    for content in (right, torch.full_like(right, 55.0)):
        model.weight.grad = content
        ps._model.pack_gradients()
        head = exchange._heads[0]
        write_head(head, Push(0, np.ones(len(head) - head_bytes(0), np.uint8)))
        works = [request.start() for request in exchange._sends]  # type: ignore[attr-defined]
        for work in works:
            work.wait(20)
    model.weight.grad = torch.full_like(right, 77.0)
    # The next step sends the messages again and receives the replies to the first ones. All replies
    # are equal.


@pytest.mark.parametrize("staleness", [1, 3, None])
def test_asynchronous_training_applies_each_gradient_once(
    staleness: int | None, threads: Callable[[int], Threads]
) -> None:
    workers, steps = 3, 12

    def check(comm: Communicator) -> Any:
        rng = np.random.default_rng(comm.rank)
        model = nn.Linear(50, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        options: dict[str, Any] = {"servers": 2, "range_bytes": 100, "staleness": staleness}
        with ParameterServer(model, plain_sgd, comm=comm, **options) as ps:
            for step in range(steps):
                if comm.rank == step % workers:
                    time.sleep(rng.uniform(0, 0.01))
                model.weight.grad = torch.full_like(model.weight, 2.0 ** (comm.rank * 10))
                ps.step()
        stats = ps.stats()
        total = [shard.values.view(torch.float64).tolist() for shard in ps._group.shards.values()]
        return stats, total

    for stats, shards in threads(workers).run(check):
        expected = -steps * sum(2.0 ** (rank * 10) for rank in range(workers))
        assert all(value == expected for shard in shards for value in shard)
        if staleness is not None:
            assert stats.most_missed <= staleness * (workers - 1)
            assert stats.most_early <= (staleness + 1) * (workers - 1)
        assert stats.mean_delay <= workers - 1
        assert stats.updates == stats.pushes


def test_workers_that_finish_no_longer_count(threads: Callable[[int], Threads]) -> None:
    def check(comm: Communicator) -> Any:
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        with ParameterServer(model, plain_sgd, comm=comm, servers=[0, 2]) as ps:
            for _ in range(2 + comm.rank):
                model.weight.grad = torch.full((1, 4), 3.0 * (comm.rank + 1))
                ps.step()
        return model.weight.detach().flatten().tolist()

    # Steps 0 and 1 use the mean of 3, 6 and 9; step 2 the mean of 6 and 9; step 3 uses 9.
    assert threads(3).run(check) == [[-12.0] * 4, [-19.5] * 4, [-28.5] * 4]


def test_a_late_worker_is_named(threads: Callable[[int], Threads]) -> None:
    servers: dict[int, ParameterServer] = {}
    formed, told = threading.Barrier(3), threading.Barrier(3)

    def check(comm: Communicator) -> Any:
        model = Mixed()
        ps = servers[comm.rank] = ParameterServer(model, sgd, comm=comm, servers=[2])
        set_gradients(model, comm.rank, 0)
        formed.wait(limit_s(20))
        if comm.rank == 1:
            # The timeout becomes short when only this rank is late, so a slow machine changes
            # nothing.
            group = servers[2]._group
            wait_until(lambda: group.counts.pushes == 2 * len(group._ranges[0]))
            assert group._loop is not None
            group._loop._timeout_s = 1.0
            told.wait(limit_s(20))
        with pytest.raises(CollectiveTimeoutError) as caught, ps:
            ps.step()
        if comm.rank != 1:
            told.wait(limit_s(20))
        return str(caught.value)

    texts = threads(3).run(check)
    for text in texts:
        assert "has waited for the parameters after step 0" in text
        assert "workers [1] have not pushed theirs" in text
