"""The parameter server with ranks as threads: the exact results of synchronous training, and the
numbers of bytes sent and received.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

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
from unisono import Communicator  # noqa: E402
from unisono.parallel import ParameterServer  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def reproducible() -> Iterator[Threads]:
    with Threads(6, reproducible=True) as world:
        yield world


def _part(comm: Communicator, ranks: int) -> Communicator | None:
    return comm.group(list(range(ranks)))


CASES = [
    (4, 1, False), (4, 2, False), (4, 4, False), (4, 1, True), (4, 2, True), (2, 4, True),
    (1, 1, False), (3, [2], False), (3, [1, 0], True),
]  # fmt: skip


@pytest.mark.parametrize(("workers", "servers", "dedicated"), CASES)
def test_synchronous_training_has_the_bits_of_reproducible_sums(
    workers: int, servers: Any, dedicated: bool, reproducible: Threads
) -> None:
    steps = 4
    count = servers if isinstance(servers, int) else len(servers)
    size = workers + count if dedicated and isinstance(servers, int) else workers

    def check(comm: Communicator) -> Any:
        part = _part(comm, size)
        if part is None:
            return None
        model = Mixed()
        if comm.rank:  # wrong values, which rank 0's values must replace
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data.fill_(7)
        options = {"servers": servers, "dedicated": dedicated, "range_bytes": RANGE_BYTES}
        with part, ParameterServer(model, sgd, comm=part, **options) as ps:
            train_steps(ps, model, comm.rank, steps)
        stats, plan = ps.stats(), ps.plan
        traffic = plan.traffic(part.rank)
        # The bytes are exactly those of the plan: the gradients and parameters of each step.
        assert stats.sent_bytes == steps * traffic.sent_bytes
        assert stats.received_bytes == steps * traffic.received_bytes
        assert (stats.repeats, stats.mean_delay, stats.most_missed, stats.most_early) == (0,) * 4
        return plan, stats, model

    found = [each for each in reproducible.run(check) if each is not None]
    plan = found[0][0]
    models = [model for _, _, model in found if model is not None]
    expected = _with_all_reduce(reproducible, plan.workers, steps)
    for worker in plan.workers:
        for (name, mine), theirs in zip(
            models[worker].named_parameters(), expected.parameters(), strict=True
        ):
            assert bits_of(mine) == bits_of(theirs), f"rank {worker}: {name}"
        assert torch.equal(models[worker].mean, torch.zeros(3))
    total = sum(shard.nbytes for shard in plan.shards)
    for rank, (_, stats, _) in enumerate(found):
        if total % count == 0:
            n, s = len(plan.workers), count
            serves, works = rank in plan.owners, rank in plan.workers
            form = n * total // s if not works else (n + s - 2) * total // s if serves else total
            assert stats.sent_bytes == stats.received_bytes == steps * form


def _with_all_reduce(world: Threads, workers: tuple[int, ...], steps: int) -> Any:
    """Returns the model after the same training with reproducible all_reduces of the workers."""

    def train(comm: Communicator) -> Any:
        part = comm.group(list(workers))
        if part is None:
            return None
        model = Mixed()
        optimizer = sgd(model.parameters())
        with part:
            for step in range(steps):
                set_gradients(model, comm.rank, step)
                for parameter in model.parameters():
                    if parameter.grad is not None and parameter.numel():
                        part.all_reduce(parameter.grad, "avg")
                optimizer.step()
        return model

    return next(model for model in world.run(train) if model is not None)


def test_nan_and_infinity_have_the_bits_of_reproducible_sums(reproducible: Threads) -> None:
    strange = np.array([0x7FC00001, 0xFF800000, 0x7F800000, 0x3F800000, 0x80000000], np.uint32)

    def check(comm: Communicator) -> Any:
        part = _part(comm, 3)
        if part is None:
            return None
        model = nn.Linear(5, 1, bias=False)
        nn.init.zeros_(model.weight)
        grad = torch.from_numpy(np.roll(strange, comm.rank).view(np.float32)).reshape(1, 5)
        with part, ParameterServer(model, identity, comm=part) as ps:
            model.weight.grad = grad.clone()
            ps.step()
            part.all_reduce(grad, "avg")
        return bits_of(model.weight), bits_of(grad)

    for mine, theirs in [each for each in reproducible.run(check) if each is not None]:
        assert mine == theirs


def _adam(params: Any) -> Any:
    return torch.optim.AdamW(params, 0.05)


def test_training_equals_one_process(threads: Callable[[int], Threads]) -> None:
    template = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def check(comm: Communicator) -> None:
        model, reference = copy.deepcopy(template), copy.deepcopy(template)
        optimizer = _adam(reference.parameters())
        options: dict[str, Any] = {"servers": 2, "range_bytes": 200}
        with ParameterServer(model, _adam, comm=comm, **options) as ps:
            for step in range(6):
                generator = torch.Generator().manual_seed(step)
                batch = torch.randn(comm.size * 4, 6, generator=generator, dtype=torch.float64)
                for net in (model, reference):
                    net.zero_grad()
                model(batch[comm.rank * 4 : comm.rank * 4 + 4]).square().mean().backward()
                reference(batch).square().mean().backward()
                ps.step()
                optimizer.step()
                for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                    assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)

    threads(3).run(check)


def test_a_parameter_that_no_worker_used_keeps_its_value_and_state(
    threads: Callable[[int], Threads],
) -> None:
    def check(comm: Communicator) -> Any:
        model = nn.ParameterDict({name: torch.ones(3) for name in ("all", "some", "none")})
        with ParameterServer(model, _adam, comm=comm, range_bytes=8, servers=2) as ps:
            for step in range(3):
                ps.zero_grad()
                model["all"].grad = torch.full((3,), 1.0)
                if comm.rank == 0:
                    model["some"].grad = torch.full((3,), 2.0)
                if step == 0:
                    model["none"].grad = torch.full((3,), 1.0)
                ps.step()
        return {name: value.detach() for name, value in model.items()}

    reference = nn.ParameterDict({name: torch.ones(3) for name in ("all", "some", "none")})
    optimizer = _adam(reference.parameters())
    for step in range(3):
        optimizer.zero_grad()
        for name in ("all", "some", *(["none"] if step == 0 else [])):
            reference[name].grad = torch.full((3,), 1.0)
        optimizer.step()
    for found in threads(2).run(check):
        for name, value in found.items():
            assert torch.equal(value, reference[name]), name
