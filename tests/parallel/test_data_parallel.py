"""Data parallelism gives the same result as one process with the whole batch, for every kind of
program.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from ranks import Threads  # noqa: E402
from unisono import Communicator, UnisonoError  # noqa: E402
from unisono.controller import Controller  # noqa: E402
from unisono.parallel import DistributedOptimizer, data_parallel  # noqa: E402

pytestmark = pytest.mark.torch

World = Callable[[int], Threads]
STEPS, ROWS = 5, 4


class Net(nn.Module):
    """Two branches, of which `forward` may omit one, and a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.left.weight
        self.never = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Any, branch: str = "both") -> Any:
        x = torch.tanh(self.first(x))
        if branch in ("both", "left"):
            x = x + self.tied(torch.tanh(self.left(x)))
        if branch in ("both", "right"):
            x = x + self.right(x)
        return self.last(x)


torch.manual_seed(3)
# one model to copy, since ranks that are threads share torch's random generator
_TEMPLATE = Net().double()


def _net() -> Net:
    return copy.deepcopy(_TEMPLATE)


def _batch(step: int, ranks: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ranks * ROWS, 6, generator=generator, dtype=torch.float64)


def _share(batch: Any, comm: Communicator) -> Any:
    return batch[comm.rank * ROWS : (comm.rank + 1) * ROWS]


def _grads(model: Any) -> dict[str, Any]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def _assert_same(model: Any, reference: Any, tolerance: float = 1e-12) -> None:
    for (name, mine), expected in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        assert torch.allclose(mine, expected, rtol=tolerance, atol=tolerance), name
        if expected.grad is None:
            assert mine.grad is None, name
        else:
            assert torch.allclose(mine.grad, expected.grad, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_equals_one_process(ranks: int, threads: World) -> None:
    def check(comm: Communicator) -> None:
        reference = _net()
        model = data_parallel(copy.deepcopy(reference), comm)
        make = lambda net: torch.optim.AdamW(net.parameters(), 1e-2)  # noqa: E731
        mine, theirs = make(model), make(reference)
        for step in range(STEPS):
            batch = _batch(step, comm.size)
            for optimizer in (mine, theirs):
                optimizer.zero_grad()
            model(_share(batch, comm)).square().mean().backward()
            reference(batch).square().mean().backward()
            _assert_same(model.module, reference)
            for net in (model, reference):
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            mine.step()
            theirs.step()
        _assert_same(model.module, reference)
        assert model.module.never.weight.grad is None
        model.close()

    threads(ranks).run(check)


def test_ranks_begin_with_the_parameters_of_rank_0(threads: World) -> None:
    def check(comm: Communicator) -> Any:
        torch.manual_seed(comm.rank)
        net = Net()
        net.norm.running_mean.fill_(comm.rank)
        model = data_parallel(net, comm)
        model.close()
        return [each.detach().clone() for each in (*net.parameters(), *net.buffers())]

    first, second = threads(2).run(check)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_parameters_unused_on_some_ranks_or_on_all(threads: World) -> None:
    def check(comm: Communicator) -> None:
        model = data_parallel(_net(), comm)
        branches = ["both", "left", "right"]
        for step in range(4 * STEPS):
            model.zero_grad()
            mine = branches[(step + comm.rank) % 3] if step % 2 else "left"
            batch = _batch(step, comm.size)
            model(_share(batch, comm), mine).sum().backward()
            expected = _net()
            total = 0.0
            for rank in range(comm.size):
                branch = branches[(step + rank) % 3] if step % 2 else "left"
                part = batch[rank * ROWS : (rank + 1) * ROWS]
                total = total + expected(part, branch).sum()
            (total / comm.size).backward()
            _assert_same(model.module, expected)
        model.close()

    threads(2).run(check)


def test_a_gradient_that_no_rank_used_keeps_its_value(threads: World) -> None:
    def check(comm: Communicator) -> None:
        model = data_parallel(_net(), comm)
        kept = torch.full((8, 8), 0.1 + comm.rank, dtype=torch.float64)
        for step in range(3):
            model.module.right.weight.grad = kept.clone()
            model(_share(_batch(step, comm.size), comm), "left").sum().backward()
            assert torch.equal(model.module.right.weight.grad, kept)
        model.close()

    threads(3).run(check)


def test_gradients_accumulate_inside_no_sync(threads: World) -> None:
    def check(comm: Communicator) -> None:
        reference = _net()
        model = data_parallel(copy.deepcopy(reference), comm)
        for step in range(STEPS):
            for net in (model, reference):
                net.zero_grad()
            for part in range(3):
                batch = _batch(10 * step + part, comm.size)
                # The last microbatch does not use the right branch, although the earlier
                # microbatches did.
                branch = "left" if part == 2 else "both"
                reference(batch, branch).square().mean().backward()
                if part < 2:
                    with model.no_sync():
                        model(_share(batch, comm), branch).square().mean().backward()
                else:
                    model(_share(batch, comm), branch).square().mean().backward()
            _assert_same(model.module, reference)
        model.close()

    threads(2).run(check)


def test_backward_twice_without_a_forward_averages_both(threads: World) -> None:
    def check(comm: Communicator) -> None:
        reference = _net()
        model = data_parallel(copy.deepcopy(reference), comm)
        for step in range(3):
            batch = _batch(step, comm.size)
            for net in (model, reference):
                net.zero_grad()
            mine = model(_share(batch, comm)).square().mean()
            whole = reference(batch).square().mean()
            for loss in (mine, whole):
                loss.backward(retain_graph=True)
                loss.backward()
            _assert_same(model.module, reference)
        model.close()

    threads(2).run(check)


def test_parameters_may_be_frozen_and_unfrozen(threads: World) -> None:
    def check(comm: Communicator) -> None:
        reference = _net()
        model = data_parallel(copy.deepcopy(reference), comm)
        for step in range(12):
            for net in (model.module, reference):
                net.zero_grad()
                net.first.requires_grad_(not 4 <= step < 8)
            batch = _batch(step, comm.size)
            model(_share(batch, comm)).square().mean().backward()
            reference(batch).square().mean().backward()
            _assert_same(model.module, reference)
        model.close()

    threads(2).run(check)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant: bool, threads: World) -> None:
    class Checkpointed(Net):
        def forward(self, x: Any, branch: str = "both") -> Any:
            x = torch.tanh(self.first(x))
            for _ in range(2):  # uses the same parameters twice
                x = checkpoint(self.left, x, use_reentrant=reentrant)
            return self.last(x)

    def check(comm: Communicator) -> None:
        reference = Checkpointed().double()
        reference.load_state_dict(_TEMPLATE.state_dict())
        model = data_parallel(copy.deepcopy(reference), comm)
        for step in range(4):
            for net in (model, reference):
                net.zero_grad()
            batch = _batch(step, comm.size)
            model(_share(batch, comm)).square().mean().backward()
            reference(batch).square().mean().backward()
            _assert_same(model.module, reference)
        model.close()

    threads(2).run(check)


def test_sparse_gradients(threads: World) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 4, sparse=True, dtype=torch.float64)
            self.last = nn.Linear(4, 1, dtype=torch.float64)

        def forward(self, ids: Any) -> Any:
            return self.last(self.table(ids)) if ids.numel() else self.last.weight.sum()

    def check(comm: Communicator) -> None:
        reference = Bag()
        nn.init.constant_(reference.last.weight, 0.5)
        nn.init.zeros_(reference.last.bias)
        with torch.no_grad():
            reference.table.weight.copy_(torch.arange(80.0).reshape(20, 4))
        model = data_parallel(copy.deepcopy(reference), comm)
        for step in range(5):
            parts = [
                torch.as_tensor(np.random.default_rng([step, rank]).integers(0, 20, 3 * rank))
                for rank in range(comm.size)
            ]
            for net in (model, reference):
                net.zero_grad()
            model(parts[comm.rank]).sum().backward()
            total = sum(reference(part).sum() for part in parts) / comm.size
            total.backward()
            mine, expected = model.module.table.weight.grad, reference.table.weight.grad
            assert mine.is_sparse
            assert torch.allclose(mine.to_dense(), expected.to_dense())
            assert torch.allclose(model.module.last.weight.grad, reference.last.weight.grad)
        model.close()

    threads(3).run(check)


def test_an_error_in_a_backward_pass_is_told_to_the_others(threads: World) -> None:
    def check(comm: Communicator) -> None:
        model = data_parallel(_net(), comm)

        def step(number: int) -> None:
            model.zero_grad()
            model(_share(_batch(number, comm.size), comm)).sum().backward()

        for number in range(4):
            step(number)
        if comm.rank == 1:
            model.module.first.weight.register_hook(_raise_once())
            with pytest.raises(ZeroDivisionError):
                step(4)
        else:
            with pytest.raises(UnisonoError, match="the backward pass of another rank raised"):
                step(4)
        for number in range(5, 8):
            step(number)
        grads = _grads(model.module)
        expected = _net()
        expected(_batch(7, comm.size)).sum().div(comm.size).backward()
        assert torch.allclose(grads["first.weight"], expected.first.weight.grad)
        model.close()

    threads(2).run(check)


def test_a_hook_that_raises_in_the_first_pass_fails_this_pass_only(threads: World) -> None:
    """The program removes the gradients before the next pass, as it does in each step."""

    def check(comm: Communicator) -> None:
        model = data_parallel(_net(), comm=comm)
        error: type[Exception] = UnisonoError
        if comm.rank == 1:
            error = ZeroDivisionError
            model.module.first.weight.register_hook(_raise_once())
        for number in range(4):
            model.zero_grad()
            loss = model(_share(_batch(number, comm.size), comm)).sum()
            if number:
                loss.backward()
                continue
            with pytest.raises(error):
                loss.backward()
        expected = _net()
        expected(_batch(3, comm.size)).sum().div(comm.size).backward()
        grads = _grads(model.module)
        for name, each in expected.named_parameters():
            if each.grad is not None:
                assert torch.allclose(grads[name], each.grad), name
        model.close()

    threads(2).run(check)


def _raise_once() -> Callable[[Any], None]:
    calls = []

    def hook(grad: Any) -> None:
        calls.append(grad)
        if len(calls) == 1:
            raise ZeroDivisionError("in the middle of a backward pass")

    return hook


def test_an_optimizer_can_be_distributed_instead(threads: World) -> None:
    def check(comm: Communicator) -> None:
        reference = _net()
        net = copy.deepcopy(reference)
        mine = DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net, comm=comm)
        theirs = torch.optim.SGD(reference.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(mine.optimizer, 2)
        for step in range(STEPS):
            batch = _batch(step, comm.size)
            mine.zero_grad()
            theirs.zero_grad()
            net(_share(batch, comm)).square().mean().backward()
            reference(batch).square().mean().backward()
            mine.step()
            theirs.step()
            theirs.param_groups[0]["lr"] = mine.param_groups[0]["lr"]
            scheduler.step()
            theirs.param_groups[0]["lr"] = mine.param_groups[0]["lr"]
            _assert_same(net, reference)
        assert mine.state_dict()["param_groups"][0]["lr"] < 0.1
        mine.close()

    threads(2).run(check)


def test_two_models_share_a_controller(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with Controller(comm) as controller:
            one = data_parallel(_net(), comm, controller=controller, name="one")
            two = data_parallel(_net(), comm, controller=controller, name="two")
            for step in range(4):
                batch = _share(_batch(step, comm.size), comm)
                models = [one, two] if comm.rank == 0 else [two, one]
                for model in models:
                    model.zero_grad()
                loss = sum(model(batch).sum() for model in models)
                loss.backward()
                for name, grad in _grads(one.module).items():
                    other = _grads(two.module)[name]
                    assert (grad is None) is (other is None)
                    assert grad is None or torch.allclose(grad, other)
            one.close()
            two.close()

    threads(2).run(check)
