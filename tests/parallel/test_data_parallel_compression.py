"""Data parallelism with compressed gradients: replicas stay equal, training converges, and the
bytes are as documented.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from parallel.compressed_training import (  # noqa: E402
    ALL,
    World,
    bits_of,
    each,
    loss_of,
    make_model,
    make_sgd,
    name_of,
    train,
)
from unisono import Communicator  # noqa: E402
from unisono.parallel import Bf16, DistributedOptimizer, Fp16, Int8, PowerSGD, TopK, data_parallel  # noqa: E402

pytestmark = pytest.mark.torch


@each
@pytest.mark.parametrize("ranks", [2, 3])
def test_training_converges_as_without_compression(
    compression: Any, ranks: int, threads: World
) -> None:
    def check(comm: Communicator) -> Any:
        losses = []
        for each_one in (None, compression):
            model = data_parallel(make_model(), comm, compression=each_one)
            first = loss_of(model.module, comm, 10_000).item()
            # Plain SGD, since momentum amplifies values that error feedback delays.
            plain = torch.optim.SGD(model.parameters(), 0.2)
            train(model, plain, comm, range(100))
            losses.append(loss_of(model.module, comm, 10_000).item())
            bits = bits_of(model)
            model.close()
        dense, compressed = losses
        assert dense < 0.2 * first
        assert compressed < 1.3 * dense + 0.02 * first, losses
        return bits

    first, *others = threads(ranks).run(check)
    assert all(other == first for other in others)  # the replicas are still equal


@each
def test_an_optimizer_gives_the_same_bits(compression: Any, threads: World) -> None:
    def check(comm: Communicator) -> None:
        model = data_parallel(make_model(), comm, compression=compression)
        train(model, make_sgd(model), comm, range(4))
        net = make_model()
        optimizer = DistributedOptimizer(make_sgd(net), net, comm=comm, compression=compression)
        train(net, optimizer, comm, range(4))
        assert bits_of(net) == bits_of(model)
        model.close()
        optimizer.close()

    threads(2).run(check)


@each
def test_no_sync_averages_the_sum_of_all_passes(compression: Any, threads: World) -> None:
    def check(comm: Communicator) -> None:
        results = []
        for accumulated in (False, True):
            model = data_parallel(make_model(), comm, compression=compression)
            for step in range(4):
                model.zero_grad()
                if accumulated:
                    with model.no_sync():
                        loss_of(model, comm, 2 * step).backward()
                    loss_of(model, comm, 2 * step + 1).backward()
                else:
                    (loss_of(model, comm, 2 * step) + loss_of(model, comm, 2 * step + 1)).backward()
            results.append([parameter.grad.clone() for parameter in model.parameters()])
            model.close()
        for together, apart in zip(*results, strict=True):
            # The sums differ in their last bits, which may change a compressed value by one step of
            # its code.
            assert (together - apart).norm() <= 0.02 * together.norm()

    threads(2).run(check)


@each
def test_parameters_that_some_ranks_or_none_use(compression: Any, threads: World) -> None:
    def check(comm: Communicator) -> Any:
        model = data_parallel(make_model(), comm, compression=compression)
        for step in range(6):
            model.zero_grad()
            branch = ("left", "right")[comm.rank] if step % 2 else "left"
            before = model.state_dict().get("compression", {}).get("parameters", {})
            loss_of(model, comm, step, branch).backward()
            after = model.state_dict().get("compression", {}).get("parameters", {})
            right = model.module.right.weight.grad
            if step % 2:
                assert right.abs().max() > 0
            else:
                assert right is None
                same = before.get("right.weight", {}), after.get("right.weight", {})
                assert all(torch.equal(same[0][what], same[1][what]) for what in same[0] | same[1])
        grads = [parameter.grad.numpy().tobytes() for parameter in model.parameters()]
        model.close()
        return grads

    first, second = threads(2).run(check)
    assert first == second


def test_fp16_equals_its_definition(threads: World) -> None:
    """Tests the definition: each rank's gradient is divided by the number of ranks and rounded to
    float16, then summed.
    """

    def check(comm: Communicator) -> None:
        model = data_parallel(make_model(), comm, compression=Fp16())
        for step in range(3):
            model.zero_grad()
            with model.no_sync():
                loss_of(model, comm, step).backward()
            local = [parameter.grad.clone() for parameter in model.parameters()]
            # a backward pass that adds zeros and exchanges the accumulated gradients
            loss_of(model, comm, step, "left").mul(0).backward()
            for mine, parameter in zip(local, model.parameters(), strict=True):
                parts = comm.all_gather((mine / comm.size).numpy().astype(np.float16)[None])
                total = parts.astype(np.float32).sum(0).astype(np.float16)
                assert parameter.grad.numpy().tobytes() == total.astype(np.float32).tobytes()
        model.close()

    threads(2).run(check)


# ---- bytes


def _message_bytes(compression: Any, shape: tuple[int, ...], ranks: int) -> int:
    """Returns the closed form of the bytes that a rank submits for a float32 gradient."""
    count = int(np.prod(shape))
    dense = 4 * count
    match compression:
        case Fp16() | Bf16():
            return 2 * count
        case PowerSGD(rank=rank, min_compression=least):
            n, m = shape[0], count // shape[0]
            columns = min(rank, n, m)
            low = 4 * columns * (n + m)
            return low if len(shape) > 1 and low * least < dense else dense
        case Int8(values_per_scale=run):
            gathered = count + 4 * -(-count // run)
        case TopK(fraction=fraction):
            gathered = 8 * max(1, int(np.ceil(fraction * count)))
        case _:
            return dense
    return gathered if gathered / dense < 2 / ranks else dense


@pytest.mark.parametrize("compression", [None, *ALL], ids=name_of)
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_equal_the_closed_form(compression: Any, ranks: int, threads: World) -> None:
    def check(comm: Communicator) -> None:
        model = data_parallel(make_model(), comm, compression=compression)
        train(model, make_sgd(model), comm, range(3))
        before = model.controller.stats().bytes
        train(model, make_sgd(model), comm, range(3, 5))
        sent = (model.controller.stats().bytes - before) // 2
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        flags = 4 * (len(shapes) + 1)
        expected = sum(_message_bytes(compression, shape, comm.size) for shape in shapes)
        assert sent == flags + expected
        model.close()

    threads(ranks).run(check)


def test_first_passes_may_be_dense(threads: World) -> None:
    def check(comm: Communicator) -> None:
        settings = PowerSGD(rank=1, dense_passes=2)
        model = data_parallel(make_model(), comm, compression=settings)
        dense = data_parallel(make_model(), comm)
        sizes = []
        for step in range(4):
            before = model.controller.stats().bytes
            for each_one in (model, dense):
                each_one.zero_grad()
                loss_of(each_one, comm, step).backward()
            sizes.append(model.controller.stats().bytes - before)
            same = all(
                torch.equal(a.grad, b.grad)
                for a, b in zip(model.parameters(), dense.parameters(), strict=True)
            )
            assert same is (step < 2)
        assert sizes[0] == sizes[1] > 2 * sizes[2] == 2 * sizes[3]
        model.close()
        dense.close()

    threads(2).run(check)


@each
def test_messages_leave_while_backward_runs(compression: Any, threads: World) -> None:
    """Tests that the last layer's gradient is submitted before the first layer has a gradient."""

    def check(comm: Communicator) -> None:
        model = data_parallel(make_model(), comm, compression=compression)
        train(model, make_sgd(model), comm, range(2))
        before = model.controller.stats().tensors_submitted
        early = []
        hook = model.module.left.weight.register_hook(
            lambda _: early.append(model.controller.stats().tensors_submitted - before)
        )
        loss_of(model, comm, 2).backward()
        hook.remove()
        assert early[0] >= 2  # the messages of last.weight and last.bias
        model.close()

    threads(2).run(check)
