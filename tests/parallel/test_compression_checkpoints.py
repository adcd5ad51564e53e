"""The state of a compression: checkpoints, failed backward passes, overflows, ranks that die."""

from __future__ import annotations

import copy
import os
import signal
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from parallel.compressed_training import (  # noqa: E402
    TEMPLATE,
    Branches,
    World,
    bits_of,
    each,
    each_with_state,
    loss_of,
    make_model,
    make_sgd,
    train,
)
from ranks import Me, Processes  # noqa: E402
from unisono import Communicator, PeerLostError, UnisonoError  # noqa: E402
from unisono.parallel import DistributedOptimizer, Fp16, Int8, PowerSGD, data_parallel  # noqa: E402

pytestmark = pytest.mark.torch


@each
@pytest.mark.parametrize("wrap", ["model", "optimizer"])
def test_training_from_a_checkpoint_gives_the_same_bits(
    compression: Any, wrap: str, threads: World, tmp_path: Any
) -> None:
    def make(comm: Communicator) -> tuple[Any, Any, Any]:
        net = make_model()
        if wrap == "model":
            model = data_parallel(net, comm, compression=compression)
            return model, make_sgd(model), model
        optimizer = DistributedOptimizer(make_sgd(net), net, comm=comm, compression=compression)
        return net, optimizer, optimizer

    def check(comm: Communicator) -> None:
        file = tmp_path / f"rank{comm.rank}.pt"
        model, optimizer, closes = make(comm)
        train(model, optimizer, comm, range(5))
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, file)
        train(model, optimizer, comm, range(5, 10))
        closes.close()
        expected = bits_of(model)

        model, optimizer, closes = make(comm)
        loaded = torch.load(file, weights_only=True)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        train(model, optimizer, comm, range(5, 10))
        closes.close()
        assert bits_of(model) == expected

    threads(2).run(check)


@each_with_state
def test_the_state_survives_another_order_of_parameters(compression: Any, threads: World) -> None:
    class Reordered(Branches):
        def __init__(self) -> None:
            super().__init__()
            for name in ("left", "right"):  # puts both modules after the module `last`
                self._modules[name] = self._modules.pop(name)

    def check(comm: Communicator) -> None:
        model = data_parallel(make_model(), comm, compression=compression)
        train(model, make_sgd(model, 0.05), comm, range(4))
        saved = copy.deepcopy(model.state_dict())
        other = data_parallel(Reordered(), comm, compression=compression)
        assert [name for name, _ in other.named_parameters()] != [
            name for name, _ in model.named_parameters()
        ]
        other.load_state_dict(saved)
        for trained in (model, other):
            trained.zero_grad()
            loss_of(trained, comm, 99).backward()
        mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
        for name, parameter in mine.items():
            assert torch.equal(parameter.grad, theirs[name].grad), name
        model.close()
        other.close()

    threads(2).run(check)


@each_with_state
def test_a_state_that_does_not_fit_is_refused(compression: Any, threads: World) -> None:
    def check(comm: Communicator) -> None:
        model = data_parallel(make_model(), comm, compression=compression)
        train(model, make_sgd(model), comm, range(2))
        good = model.state_dict()
        other_rank = {**good, "compression": {**good["compression"], "rank": 1 - comm.rank}}
        with pytest.raises(ValueError, match=r"expected that of rank \d, got \d; every rank saves"):
            model.load_state_dict(other_rank)
        parameters = good["compression"]["parameters"]
        unknown = {**good["compression"], "parameters": {"nobody": parameters["left.weight"]}}
        with pytest.raises(ValueError, match="the model has no parameter 'nobody'"):
            model.load_state_dict({**good, "compression": unknown})
        swapped = {**good["compression"], "parameters": {"last.weight": parameters["left.weight"]}}
        with pytest.raises(ValueError, match=r"expected the shape \(3, 16\), got \(16, 12\)"):
            model.load_state_dict({**good, "compression": swapped})
        without = {name: value for name, value in good.items() if name != "compression"}
        with pytest.raises(RuntimeError, match=r'Missing key.*"compression"'):
            model.load_state_dict(without)
        model.load_state_dict(without, strict=False)
        assert model.module.state_dict().keys() == TEMPLATE.state_dict().keys()
        model.close()

    threads(2).run(check)


def test_exchanges_without_state_leave_checkpoints_alone(threads: World) -> None:
    def check(comm: Communicator) -> None:
        for compression in (None, Fp16(), Int8(error_feedback=False)):
            model = data_parallel(make_model(), comm, compression=compression)
            train(model, make_sgd(model), comm, range(2))
            assert "compression" not in model.state_dict()
            model.close()

    threads(2).run(check)


# ---- failures


@each
def test_a_failed_pass_leaves_the_state_as_it_was(compression: Any, threads: World) -> None:
    def check(comm: Communicator) -> Any:
        model = data_parallel(make_model(), comm, compression=compression)
        train(model, make_sgd(model), comm, range(3))
        before = copy.deepcopy(model.state_dict().get("compression"))
        model.zero_grad()
        if comm.rank == 1:
            hook = model.module.left.weight.register_hook(lambda _: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(model, comm, 3).backward()
            hook.remove()
        else:
            with pytest.raises(UnisonoError, match="the backward pass of another rank raised"):
                loss_of(model, comm, 3).backward()
        model.zero_grad()
        # Here rank 1 reports its error to the other ranks, which wait for this.
        loss = loss_of(model, comm, 4)
        _assert_equal_states(before, model.state_dict().get("compression"))
        loss.backward()
        train(model, make_sgd(model), comm, range(5, 7))
        bits = bits_of(model)
        model.close()
        return bits

    first, second = threads(2).run(check)
    assert first == second


@each_with_state
def test_an_overflow_does_not_stay_in_the_state(compression: Any, threads: World) -> None:
    """Tests that a step with an overflow, which a GradScaler skips, does not change the state."""

    def check(comm: Communicator) -> None:
        model = data_parallel(make_model(), comm, compression=compression)
        train(model, make_sgd(model), comm, range(3))
        before = copy.deepcopy(model.state_dict()["compression"])
        model.zero_grad()
        scale = float("inf") if comm.rank == 1 else 1.0
        (loss_of(model, comm, 3) * scale).backward()
        for parameter in model.parameters():
            assert not torch.isfinite(parameter.grad).all()  # all ranks see the overflow
        _assert_equal_states(before, model.state_dict()["compression"])
        model.close()

    threads(2).run(check)


def _assert_equal_states(first: Any, second: Any) -> None:
    assert (first is None) is (second is None)
    if first is not None:
        assert first["parameters"].keys() == second["parameters"].keys()
        for name, tensors in first["parameters"].items():
            for what, tensor in tensors.items():
                assert torch.equal(tensor, second["parameters"][name][what]), (name, what)


def own_killed_in_the_first_round(me: Me) -> None:
    comm = me.join()
    model = data_parallel(make_model(), comm, compression=PowerSGD(rank=1))
    train(model, make_sgd(model), comm, range(3))
    # rank 1 dies after it sent PowerSGD's matrix P of the last layers, and before it sends that of
    # the first layer
    if me.rank == 1:
        model.module.left.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    me.say("trained")
    me.attempt("step", lambda: train(model, make_sgd(model), comm, range(3, 4)))
    model.close()
    comm.close()


def test_a_killed_rank_is_named() -> None:
    with Processes(own_killed_in_the_first_round, 2) as world:
        (outcome,) = world.wait_for("step", [0], 100)
        assert outcome["error"] == PeerLostError.__name__, outcome
        assert "rank 1" in outcome["text"]
