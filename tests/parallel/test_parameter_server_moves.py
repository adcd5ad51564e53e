"""The parameter server in a new group of ranks, its snapshots, and its errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from parallel.served_training import (  # noqa: E402
    Identity,
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


def test_snapshots_appear_and_old_ones_go(
    threads: Callable[[int], Threads], tmp_path: Path
) -> None:
    def check(comm: Communicator) -> None:
        model = Mixed()
        options: dict[str, Any] = {"snapshot_every": 2, "snapshot_folder": tmp_path}
        with ParameterServer(model, sgd, comm=comm, servers=2, **options) as ps:
            train_steps(ps, model, comm.rank, 7)

    threads(2).run(check)
    names = sorted(path.name.split("-", 1)[1] for path in tmp_path.iterdir())
    assert names == [f"shard-{shard}-step-{step}.pt" for shard in (0, 1) for step in (4, 6)]


# ---- training continues in a new group


def test_a_new_rank_replaces_one_and_gets_parameters_optimizers_and_step(
    threads: Callable[[int], Threads],
) -> None:
    """Tests that workers 0 and 1 continue in a new group with a new worker 2, to which the shard of
    rank 0 moves. The results must equal those of one process bit by bit.
    """
    ended: dict[int, ParameterServer] = {}

    def first(comm: Communicator) -> None:
        model = Mixed()
        with ParameterServer(model, sgd, comm=comm, servers=[0, 1], range_bytes=300) as ps:
            train_steps(ps, model, comm.rank, 3)
        ended[comm.rank] = ps

    def second(comm: Communicator) -> Any:
        model = Mixed()
        if comm.rank == 2:
            model = copy.deepcopy(model)
            for parameter in model.parameters():
                parameter.data.fill_(3)
        previous = ended.get(comm.rank)
        options: dict[str, Any] = {"servers": [2, 1], "range_bytes": 300, "previous": previous}
        with ParameterServer(model, sgd, comm=comm, **options) as ps:
            assert ps.stats().steps == 3
            for step in range(3, 6):
                set_gradients(model, comm.rank, step)
                ps.step()
        return [bits_of(each) for each in model.parameters()]

    threads(2).run(first)
    found = threads(3).run(second)

    reference = Mixed()
    optimizer = sgd(reference.parameters())
    for step in range(6):
        ranks = range(2 if step < 3 else 3)
        each = []
        for rank in ranks:
            set_gradients(reference, rank, step)
            each.append([p.grad for p in reference.parameters() if p.requires_grad])
        trained = [p for p in reference.parameters() if p.requires_grad]
        for parameter, grads in zip(trained, zip(*each, strict=True), strict=True):
            wide = torch.float32 if parameter.itemsize < 4 else parameter.dtype
            total = grads[0].to(wide)
            for grad in grads[1:]:
                total = total + grad.to(wide)
            parameter.grad = (total / len(grads)).to(parameter.dtype)
        optimizer.step()
    assert found == [[bits_of(each) for each in reference.parameters()]] * 3


def test_a_shard_that_nobody_holds_is_refused(threads: Callable[[int], Threads]) -> None:
    ended: dict[int, ParameterServer] = {}

    def first(comm: Communicator) -> None:
        with ParameterServer(Mixed(), sgd, comm=comm, servers=2) as ps:
            ended[comm.rank] = ps

    def second(comm: Communicator) -> None:
        previous = ended[0] if comm.rank == 0 else None
        with pytest.raises(ValueError, match="a rank that holds shard 1 of 2, found none"):
            ParameterServer(Mixed(), sgd, comm=comm, servers=2, previous=previous)

    threads(2).run(first)
    threads(2).run(second)


# ---- errors


def test_wrong_arguments_are_refused(threads: Callable[[int], Threads]) -> None:
    def check(comm: Communicator) -> None:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"staleness": -1}, "staleness: expected None or 0 and more, found -1"),
            ({"servers": 3}, "servers: expected 1 to 2 of 2 ranks, found 3"),
            ({"servers": 2, "dedicated": True}, "servers: expected 1 to 1 of 2 ranks"),
            ({"range_bytes": 0}, "range_bytes: expected 1 and more, found 0"),
            ({"snapshot_every": 5}, "expected both or none, found 5 and None"),
        ]
        for options, text in wrong:
            with pytest.raises(ValueError, match=text):
                ParameterServer(Mixed(), sgd, comm=comm, **options)
        frozen = Mixed().requires_grad_(False)
        with pytest.raises(ValueError, match="a parameter that requires a gradient, found none"):
            ParameterServer(frozen, sgd, comm=comm)
        with pytest.raises(ValueError, match="staleness: expected the same value on all ranks"):
            ParameterServer(Mixed(), sgd, comm=comm, staleness=comm.rank)
        with pytest.raises(ValueError, match=r"found \['weight: 4 float32'\] on rank 0 and"):
            model = nn.Linear(4, 1 + comm.rank, bias=False)
            ParameterServer(model, sgd, comm=comm)
        ps = ParameterServer(Mixed(), sgd, comm=comm)
        with pytest.raises(ValueError, match=f"serve: rank {comm.rank} is a worker"):
            ps.serve()
        ps.close()
        ps.close()  # a second close has no effect
        with pytest.raises(ValueError, match="is closed: make a new one"):
            ps.step()

    threads(2).run(check)


def test_an_error_of_the_optimizer_ends_the_training_of_all(
    threads: Callable[[int], Threads],
) -> None:
    class Failing(Identity):
        def step(self, closure: Any = None) -> None:
            raise ZeroDivisionError("in the optimizer")

    def check(comm: Communicator) -> Any:
        model = Mixed()
        ps = ParameterServer(model, Failing, comm=comm, servers=[1])
        set_gradients(model, comm.rank, 0)
        with pytest.raises((ZeroDivisionError, AbortedError)) as caught, ps:
            ps.step()
        return type(caught.value).__name__, str(caught.value)

    first, second = threads(2).run(check)
    assert second == ("ZeroDivisionError", "in the optimizer")
    assert first[0] == "AbortedError"
    assert "the parameter server failed: ZeroDivisionError: in the optimizer" in first[1]


def test_a_dedicated_server_has_no_steps() -> None:
    def check(comm: Communicator) -> None:
        model = Mixed()
        with ParameterServer(model, sgd, comm=comm, dedicated=True) as ps:
            if ps.is_worker:
                train_steps(ps, model, comm.rank, 1)
                return
            with pytest.raises(ValueError, match="step: rank 1 is a dedicated server"):
                ps.step()
            ps.serve()

    with Threads(2) as world:
        world.run(check)


def test_one_rank_needs_no_peer() -> None:
    model = Mixed()
    with (
        init(rank=0, size=1, rendezvous=unique_name()) as comm,
        ParameterServer(model, identity, comm=comm) as ps,
    ):
        set_gradients(model, 0, 0)
        ps.step()
        assert ps.stats().sent_bytes == 0
    for parameter in model.parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter, parameter.grad)
