"""Local SGD and DiLoCo equal data parallelism, or averages of parameters, in the cases where the
theory requires it.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from ranks import Me, Processes, Threads  # noqa: E402
from unisono import Communicator, PeerLostError  # noqa: E402
from unisono.parallel import (  # noqa: E402
    DiLoCo,
    Fp16,
    Int8,
    LocalSGD,
    PowerSGD,
    TopK,
    data_parallel,
)

pytestmark = pytest.mark.torch

World = Callable[[int], Threads]
ROWS = 6


class Small(nn.Module):
    """A layer with running means, and a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 12)
        self.norm = nn.BatchNorm1d(12)
        self.last = nn.Linear(12, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return self.last(torch.tanh(self.norm(self.first(x)))) * self.frozen


torch.manual_seed(11)
_TEMPLATE = Small().double()


def _model(*, norm: bool = True) -> Small:
    model = copy.deepcopy(_TEMPLATE)
    if not norm:
        model.norm = nn.Identity()
    return model


def _gradients(model: Any, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    model.zero_grad()
    (model(x) - x[:, :2].sin()).square().mean().backward()


def _values(model: Any) -> list[np.ndarray]:
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def _assert_close(first: list[np.ndarray], second: list[np.ndarray]) -> None:
    for a, b in zip(first, second, strict=True):
        assert np.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("ranks", [1, 3])
def test_an_average_after_each_step_equals_data_parallelism(
    momentum: float, ranks: int, threads: World
) -> None:
    def check(comm: Communicator) -> None:
        dense = data_parallel(_model(norm=False), comm)
        sgd = torch.optim.SGD(dense.parameters(), 0.1, momentum=momentum)
        net = _model(norm=False)
        inner = torch.optim.SGD(net.parameters(), 0.1, momentum=momentum)
        local = LocalSGD(net, inner, comm=comm, every=1)
        for step in range(6):
            _gradients(dense, comm.rank, step)
            sgd.step()
            _gradients(net, comm.rank, step)
            local.step()
            _assert_close(_values(net), _values(dense))
        dense.close()
        local.close()

    threads(ranks).run(check)


@pytest.mark.parametrize("every", [2, 3])
def test_ranks_meet_after_exactly_every_steps(every: int, threads: World) -> None:
    """Tests that parameters and running means equal the averages of ranks that train alone,
    computed in one process.
    """
    steps, ranks = 7, 3

    def make(net: Any) -> Any:
        groups = [{"params": net.first.parameters()}, {"params": net.last.parameters(), "lr": 0.02}]
        return torch.optim.AdamW(groups, 0.01)

    nets = [_model() for _ in range(ranks)]
    alone = [make(net) for net in nets]
    expected = []
    for step in range(steps):
        for rank, (net, optimizer) in enumerate(zip(nets, alone, strict=True)):
            _gradients(net, rank, step)
            optimizer.step()
        if (step + 1) % every == 0:
            for values in zip(*(net.parameters() for net in nets), strict=True):
                mean = torch.stack([value.data for value in values]).mean(0)
                for value in values:
                    value.data.copy_(mean)
            mean = torch.stack([net.norm.running_mean for net in nets]).mean(0)
            for net in nets:
                net.norm.running_mean.copy_(mean)
        expected.append([(*_values(net), net.norm.running_mean.numpy().copy()) for net in nets])

    def check(comm: Communicator) -> None:
        net = _model()
        local = LocalSGD(net, make(net), comm=comm, every=every)
        for step in range(steps):
            before = local.controller.stats().tensors_submitted
            _gradients(net, comm.rank, step)
            local.step()
            exchanged = local.controller.stats().tensors_submitted - before
            # The exchange happens once in a step, and not once for each parameter group.
            trained = sum(1 for each in net.parameters() if each.requires_grad)
            tensors = trained + len(list(net.buffers()))
            assert exchanged == (tensors if (step + 1) % every == 0 else 0)
            found = [*_values(net), net.norm.running_mean.numpy()]
            _assert_close(found, expected[step][comm.rank])
        local.close()

    threads(ranks).run(check)


def test_first_steps_may_be_dense(threads: World) -> None:
    def check(comm: Communicator) -> Any:
        net = _model(norm=False)
        inner = torch.optim.SGD(net.parameters(), 0.1)
        local = LocalSGD(net, inner, comm=comm, every=3, dense_steps=2)
        met = []
        for step in range(9):
            before = local.controller.stats().tensors_submitted
            _gradients(net, comm.rank, step)
            local.step()
            met.append(local.controller.stats().tensors_submitted > before)
        local.close()
        return met

    yes, no = True, False
    assert threads(2).run(check) == [[yes, yes, no, no, yes, no, no, yes, no]] * 2


def test_diloco_with_plain_outer_sgd_averages_parameters(threads: World) -> None:
    def check(comm: Communicator) -> None:
        nets = [_model(norm=False), _model(norm=False)]
        inner = [torch.optim.AdamW(net.parameters(), 0.01) for net in nets]
        diloco = DiLoCo(
            nets[0], inner[0], comm=comm, every=3, outer=lambda each: torch.optim.SGD(each, lr=1.0)
        )
        local = LocalSGD(nets[1], inner[1], comm=comm, every=3)
        for step in range(9):
            for net, optimizer in zip(nets, (diloco, local), strict=True):
                _gradients(net, comm.rank, step)
                optimizer.step()
            _assert_close(_values(nets[0]), _values(nets[1]))
        diloco.close()
        local.close()

    threads(3).run(check)


def test_diloco_equals_its_definition_in_one_process(threads: World) -> None:
    steps, every, ranks = 12, 4, 2
    start = [parameter.detach().numpy().copy() for parameter in _model(norm=False).parameters()]
    momentum = [np.zeros_like(value) for value in start]
    nets = [_model(norm=False) for _ in range(ranks)]
    inner = [torch.optim.AdamW(net.parameters(), 0.01) for net in nets]
    for step in range(steps):
        for rank in range(ranks):
            _gradients(nets[rank], rank, step)
            inner[rank].step()
        if (step + 1) % every == 0:
            for index in range(len(start)):
                now = np.mean([_values(net)[index] for net in nets], axis=0)
                grad = start[index] - now
                momentum[index] = 0.9 * momentum[index] + grad
                start[index] = start[index] - 0.7 * (grad + 0.9 * momentum[index])
                for net in nets:
                    list(net.parameters())[index].data.copy_(torch.from_numpy(start[index]))

    def check(comm: Communicator) -> None:
        net = _model(norm=False)
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        diloco = DiLoCo(net, optimizer, comm=comm, every=every)
        for step in range(steps):
            _gradients(net, comm.rank, step)
            diloco.step()
        _assert_close(_values(net), start)
        diloco.close()

    threads(ranks).run(check)


@pytest.mark.parametrize(
    "compression", [None, Fp16(), Int8(), TopK(fraction=0.2), PowerSGD(rank=1, min_compression=1)]
)
def test_a_checkpoint_within_a_period_gives_the_same_bits(
    compression: Any, threads: World, tmp_path: Any
) -> None:
    def check(comm: Communicator) -> Any:
        def make() -> tuple[Any, Any]:
            net = _model()
            inner = torch.optim.AdamW(net.parameters(), 0.01)
            return net, DiLoCo(net, inner, comm=comm, every=3, compression=compression)

        def train(net: Any, optimizer: Any, steps: range) -> None:
            for step in steps:
                _gradients(net, comm.rank, step)
                optimizer.step()

        net, optimizer = make()
        train(net, optimizer, range(7))
        file = tmp_path / f"rank{comm.rank}.pt"
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
        train(net, optimizer, range(7, 12))
        optimizer.close()
        expected = [value.tobytes() for value in _values(net)]
        net, optimizer = make()
        saved = torch.load(file, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(net, optimizer, range(7, 12))
        optimizer.close()
        assert [value.tobytes() for value in _values(net)] == expected
        return expected

    first, second = threads(2).run(check)
    assert first == second  # step 12 is the end of a period


def test_local_sgd_resumes_within_a_period(threads: World) -> None:
    def check(comm: Communicator) -> None:
        nets = [_model(), _model()]
        inner = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in nets]
        local = [LocalSGD(*pair, comm=comm, every=4) for pair in zip(nets, inner, strict=True)]
        for step in range(6):
            _gradients(nets[0], comm.rank, step)
            local[0].step()
        nets[1].load_state_dict(nets[0].state_dict())
        local[1].load_state_dict(copy.deepcopy(local[0].state_dict()))
        for step in range(6, 9):
            for net, optimizer in zip(nets, local, strict=True):
                _gradients(net, comm.rank, step)
                optimizer.step()
        first, second = ([value.tobytes() for value in _values(net)] for net in nets)
        assert first == second
        for each in local:
            each.close()

    threads(2).run(check)


def test_wrong_arguments_and_states_are_refused(threads: World) -> None:
    def check(comm: Communicator) -> None:
        net = _model()
        sgd = torch.optim.SGD(net.parameters(), 0.1)
        for make in (
            lambda: LocalSGD(net, sgd, comm=comm, every=0),
            lambda: LocalSGD(net, sgd, comm=comm, every=1, dense_steps=-1),
            lambda: DiLoCo(net, sgd, comm=comm, every=-2),
        ):
            with pytest.raises(ValueError, match="expected"):
                make()
        diloco = DiLoCo(net, sgd, comm=comm, every=2)
        state = diloco.state_dict()
        state["start"].pop("first.weight")
        with pytest.raises(ValueError, match=r"first\.weight are in one of the two only"):
            diloco.load_state_dict(state)
        # other attributes are those of the inner optimizer
        assert diloco.param_groups is sgd.param_groups
        diloco.close()

    threads(1).run(check)


def own_killed_before_it_meets(me: Me) -> None:
    comm = me.join()
    net = _model()
    local = LocalSGD(net, torch.optim.SGD(net.parameters(), 0.1), comm=comm, every=3)

    def train() -> None:
        for step in range(6):
            if me.rank == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            _gradients(net, me.rank, step)
            local.step()

    me.attempt("trained", train)
    local.close()
    comm.close()


def test_a_killed_rank_is_named() -> None:
    with Processes(own_killed_before_it_meets, 2) as world:
        (outcome,) = world.wait_for("trained", [0], 100)
        assert outcome["error"] == PeerLostError.__name__, outcome
        assert "rank 1" in outcome["text"]
