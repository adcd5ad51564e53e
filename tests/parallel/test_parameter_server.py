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
from ranks import Threads, unique_name  # noqa: E402
from unisono import AbortedError, Communicator, init  # noqa: E402
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


# ---- learning rates


def _one_process(workers: list[int], rates: list[float | None]) -> list[bytes]:
    """Trains one model in this process, with the mean of the workers' gradients in each step. For
    each step, `workers` has the number of workers, and `rates` the learning rate or None.
    """
    model = Rates()
    optimizer = _momentum(model.named_parameters())
    for step, (count, rate) in enumerate(zip(workers, rates, strict=True)):
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate
        totals = [torch.zeros_like(each) for each in model.parameters()]
        for rank in range(count):
            _set_gradients(model, rank, step)
            for total, each in zip(totals, model.parameters(), strict=True):
                total.add_(each.grad)
        for total, each in zip(totals, model.parameters(), strict=True):
            each.grad = total / count
        optimizer.step()
    return [bits_of(each) for each in model.parameters()]


class Rates(nn.Module):  # type: ignore[misc]
    """Parameters of two groups of `_momentum`, over several ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.decayed = nn.Parameter(torch.linspace(-1, 1, 50, dtype=torch.float64))
        self.plain = nn.Parameter(torch.linspace(-2, 2, 30, dtype=torch.float64))


def _set_gradients(model: Rates, rank: int, step: int) -> None:
    for each in model.parameters():
        each.grad = torch.linspace(rank, step + 1, each.numel(), dtype=torch.float64)


def _momentum(params: Any) -> Any:
    named = list(params)
    decayed = [each for name, each in named if name == "decayed"]
    plain = [each for name, each in named if name == "plain"]
    groups = [{"params": decayed, "weight_decay": 0.1, "lr": 0.5}, {"params": plain}]
    return torch.optim.SGD([group for group in groups if group["params"]], 0.1, momentum=0.9)


def test_learning_rates_of_a_schedule_equal_one_process_when_shards_move(
    threads: Callable[[int], Threads],
) -> None:
    """Tests that a schedule goes on in a new group with a new worker, to which a shard moves."""
    ended: dict[int, ParameterServer] = {}
    rates: list[float | None] = [None, 0.2, 0.1, 0.05, 0.025, 0.0125]

    def train(comm: Communicator, until: int, **options: Any) -> list[bytes]:
        model = Rates()
        made = ParameterServer(model, _momentum, comm=comm, range_bytes=128, **options)
        with made as ps:
            for step in range(ps.stats().steps, until):
                if (rate := rates[step]) is not None:
                    ps.set_learning_rate(rate)
                _set_gradients(model, comm.rank, step)
                ps.step()
        ended[comm.rank] = ps
        return [bits_of(each) for each in model.parameters()]

    before = threads(2).run(lambda comm: train(comm, 3, servers=[0, 1]))
    assert before == [_one_process([2] * 3, rates[:3])] * 2
    held = dict(ended)
    after = threads(3).run(
        lambda comm: train(comm, 6, servers=[2, 1], previous=held.get(comm.rank))
    )
    assert after == [_one_process([2] * 3 + [3] * 3, rates)] * 3


def test_different_learning_rates_fail_on_all_ranks(threads: Callable[[int], Threads]) -> None:
    def check(comm: Communicator) -> str:
        model = Mixed()
        ps = ParameterServer(model, sgd, comm=comm, servers=[1])
        with pytest.raises(ValueError, match="learning_rate: expected 0 or more, found nan"):
            ps.set_learning_rate(float("nan"))
        ps.set_learning_rate(0.1 * (comm.rank + 1))
        set_gradients(model, comm.rank, 0)
        with pytest.raises((ValueError, AbortedError)) as caught, ps:
            ps.step()
        return str(caught.value)

    for text in threads(2).run(check):
        assert "expected the same learning rate on all workers in a step, found 0.1 and 0.2" in text


def test_what_cannot_follow_a_learning_rate_is_refused(
    threads: Callable[[int], Threads],
) -> None:
    def scheduled(params: Any) -> Any:
        optimizer = sgd(params)
        torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return optimizer

    def check(comm: Communicator) -> str:
        model = Mixed()
        with (
            pytest.raises((ValueError, AbortedError)) as caught,
            ParameterServer(model, scheduled, comm=comm, servers=[1]) as ps,
        ):
            train_steps(ps, model, comm.rank, 1)
        return str(caught.value)

    for text in threads(2).run(check):
        assert "optimizer: expected one without a learning-rate scheduler" in text

    with init(rank=0, size=1, rendezvous=unique_name()) as comm:
        model = Mixed()
        ps = ParameterServer(model, identity, comm=comm)
        ps.set_learning_rate(0.1)
        set_gradients(model, 0, 0)
        with pytest.raises(ValueError, match="Identity has no learning rate"), ps:
            ps.step()
