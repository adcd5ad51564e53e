"""The parameter server between threads: bits, bytes, repeats, staleness, ends, moves."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from ranks import Threads, unique_name  # noqa: E402
from time_limits import limit_s  # noqa: E402
from unisono import AbortedError, CollectiveTimeoutError, Communicator, init  # noqa: E402
from unisono.parallel import ParameterServer  # noqa: E402

pytestmark = pytest.mark.torch

RANGE_BYTES = 256


class Mixed(nn.Module):
    """Parameters of three types and odd sizes, a shared one, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape, dtype in (
            ("narrow", (31,), torch.bfloat16),
            ("one", (1,), torch.float32),
            ("wide", (7, 9), torch.float64),
            ("plain", (23, 5), torch.float32),
            ("empty", (0,), torch.float32),
            ("sixteen", (13,), torch.float16),
        ):
            values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            setattr(self, name, nn.Parameter(values))
        self.shared = self.plain
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mean", torch.zeros(3))


def _gradients(model: nn.Module, rank: int, step: int) -> None:
    """Sets gradients with exponents so different that the order of a sum shows in its bits."""
    rng = np.random.default_rng([rank, step])
    for parameter in model.parameters():
        if parameter.requires_grad:
            values = np.ldexp(
                rng.normal(size=parameter.shape), rng.integers(-8, 8, parameter.shape)
            )
            parameter.grad = torch.from_numpy(np.asarray(values)).to(parameter.dtype)


def _sgd(params: Any) -> Any:
    return torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01)


@pytest.fixture(scope="module")
def reproducible() -> Iterator[Threads]:
    with Threads(6, reproducible=True) as world:
        yield world


def _part(comm: Communicator, ranks: int) -> Communicator | None:
    return comm.group(list(range(ranks)))


def _train(ps: ParameterServer, model: nn.Module, rank: int, steps: int) -> None:
    if not ps.is_worker:
        ps.serve()
        return
    for step in range(steps):
        _gradients(model, rank, step)
        ps.step()


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
        if comm.rank:  # all begin with rank 0's values
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data.fill_(7)
        options = {"servers": servers, "dedicated": dedicated, "range_bytes": RANGE_BYTES}
        with part, ParameterServer(model, _sgd, comm=part, **options) as ps:
            _train(ps, model, comm.rank, steps)
        stats, plan = ps.stats(), ps.plan
        traffic = plan.traffic(part.rank)
        # The gradients and parameters of each step, and nothing else, and exactly the plan's.
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
            assert _bits(mine) == _bits(theirs), f"rank {worker}: {name}"
        assert torch.equal(models[worker].mean, torch.zeros(3))
    total = sum(shard.nbytes for shard in plan.shards)
    for rank, (_, stats, _) in enumerate(found):
        if total % count == 0:
            n, s = len(plan.workers), count
            serves, works = rank in plan.owners, rank in plan.workers
            form = n * total // s if not works else (n + s - 2) * total // s if serves else total
            assert stats.sent_bytes == stats.received_bytes == steps * form


def _bits(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())


def _with_all_reduce(world: Threads, workers: tuple[int, ...], steps: int) -> Any:
    """Returns the model after the same training by reproducible all_reduces of the workers."""

    def train(comm: Communicator) -> Any:
        part = comm.group(list(workers))
        if part is None:
            return None
        model = Mixed()
        optimizer = _sgd(model.parameters())
        with part:
            for step in range(steps):
                _gradients(model, comm.rank, step)
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
        with part, ParameterServer(model, _identity, comm=part) as ps:
            model.weight.grad = grad.clone()
            ps.step()
            part.all_reduce(grad, "avg")
        return _bits(model.weight), _bits(grad)

    for mine, theirs in [each for each in reproducible.run(check) if each is not None]:
        assert mine == theirs


class _Identity(torch.optim.Optimizer):  # type: ignore[misc]
    """Replaces each parameter by its gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.copy_(parameter.grad)


def _identity(params: Any) -> Any:
    return _Identity(params)


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


def test_a_repeated_push_changes_nothing_and_is_answered(
    threads: Callable[[int], Threads],
) -> None:
    def check(comm: Communicator) -> Any:
        model = Mixed()
        options: dict[str, Any] = {"servers": 2, "range_bytes": RANGE_BYTES}
        with ParameterServer(model, _sgd, comm=comm, **options) as ps:
            _gradients(model, comm.rank, 0)
            ps.step()
            _gradients(model, comm.rank, 1)
            ps.step()
            expected = [each.detach().clone() for each in model.parameters()]
            if comm.rank == 1:
                for old in (1, 0, 1):
                    _push_again(ps, model, old)
                    for mine, theirs in zip(model.parameters(), expected, strict=True):
                        assert torch.equal(mine, theirs)
            _gradients(model, comm.rank, 2)
            ps.step()
        stats = ps.stats()
        return [_bits(each) for each in model.parameters()], stats

    def plainly(comm: Communicator) -> Any:
        model = Mixed()
        options: dict[str, Any] = {"servers": 2, "range_bytes": RANGE_BYTES}
        with ParameterServer(model, _sgd, comm=comm, **options) as ps:
            _train(ps, model, comm.rank, 3)
        return [_bits(each) for each in model.parameters()]

    found, expected = threads(3).run(check), threads(3).run(plainly)
    assert [bits for bits, _ in found] == expected
    repeats = [stats.repeats for _, stats in found]
    ranges = [stats.updates // 3 for _, stats in found]
    assert repeats == [3 * count for count in ranges]
    assert sum(ranges) > 2


def _push_again(ps: ParameterServer, model: nn.Module, step: int) -> None:
    """Sends the message of an earlier step once more, with another content."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 99.0)
    used = ps._model.pack_gradients()
    ps._group.exchange.exchange(step, used, 20.0)
    ps._model.unpack_values()


def test_a_repeated_push_before_the_first_is_applied_does_not_replace_it(
    threads: Callable[[int], Threads],
) -> None:
    entered = threading.Event()

    def check(comm: Communicator) -> Any:
        model = nn.Linear(40, 1, bias=False)
        nn.init.zeros_(model.weight)
        with ParameterServer(model, _identity, comm=comm, range_bytes=64) as ps:
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
    """Sends all messages of step 0, and again with another content, before anyone answers."""
    exchange = ps._group.exchange
    assert model.weight.grad is not None
    right = model.weight.grad.clone()
    for content in (right, torch.full_like(right, 55.0)):
        model.weight.grad = content
        ps._model.pack_gradients()
        exchange._heads[0][:16].view(np.int64)[0] = 0
        exchange._heads[0][16:] = 1
        works = [request.start() for request in exchange._sends]  # type: ignore[attr-defined]
        for work in works:
            work.wait(20)
    model.weight.grad = torch.full_like(right, 77.0)
    # The step that follows repeats them once more, and takes the first answers; all are equal.


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
        plain = lambda params: torch.optim.SGD(params, 1.0)  # noqa: E731
        with ParameterServer(model, plain, comm=comm, **options) as ps:
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
        plain = lambda params: torch.optim.SGD(params, 1.0)  # noqa: E731
        with ParameterServer(model, plain, comm=comm, servers=[0, 2]) as ps:
            for _ in range(2 + comm.rank):
                model.weight.grad = torch.full((1, 4), 3.0 * (comm.rank + 1))
                ps.step()
        return model.weight.detach().flatten().tolist()

    # Steps 0, 1: the mean of 3, 6, 9; step 2: of 6 and 9; step 3: 9.
    assert threads(3).run(check) == [[-12.0] * 4, [-19.5] * 4, [-28.5] * 4]


def test_snapshots_appear_and_old_ones_go(
    threads: Callable[[int], Threads], tmp_path: Path
) -> None:
    def check(comm: Communicator) -> None:
        model = Mixed()
        options: dict[str, Any] = {"snapshot_every": 2, "snapshot_folder": tmp_path}
        with ParameterServer(model, _sgd, comm=comm, servers=2, **options) as ps:
            _train(ps, model, comm.rank, 7)

    threads(2).run(check)
    names = sorted(path.name.split("-", 1)[1] for path in tmp_path.iterdir())
    assert names == [f"shard-{shard}-step-{step}.pt" for shard in (0, 1) for step in (4, 6)]


# ---- another group goes on


def test_a_new_rank_replaces_one_and_gets_parameters_optimizers_and_step(
    threads: Callable[[int], Threads],
) -> None:
    """Workers 0 and 1 train; then 1 and a new one, in a new group, with the server moved."""
    ended: dict[int, ParameterServer] = {}

    def first(comm: Communicator) -> None:
        model = Mixed()
        with ParameterServer(model, _sgd, comm=comm, servers=[0, 1], range_bytes=300) as ps:
            _train(ps, model, comm.rank, 3)
        ended[comm.rank] = ps

    def second(comm: Communicator) -> Any:
        model = Mixed()
        if comm.rank == 2:
            model = copy.deepcopy(model)
            for parameter in model.parameters():
                parameter.data.fill_(3)
        previous = ended.get(comm.rank)
        options: dict[str, Any] = {"servers": [2, 1], "range_bytes": 300, "previous": previous}
        with ParameterServer(model, _sgd, comm=comm, **options) as ps:
            assert ps.stats().steps == 3
            for step in range(3, 6):
                _gradients(model, comm.rank, step)
                ps.step()
        return [_bits(each) for each in model.parameters()]

    threads(2).run(first)
    found = threads(3).run(second)

    reference = Mixed()
    optimizer = _sgd(reference.parameters())
    for step in range(6):
        ranks = range(2 if step < 3 else 3)
        each = []
        for rank in ranks:
            _gradients(reference, rank, step)
            each.append([p.grad for p in reference.parameters() if p.requires_grad])
        trained = [p for p in reference.parameters() if p.requires_grad]
        for parameter, grads in zip(trained, zip(*each, strict=True), strict=True):
            wide = torch.float32 if parameter.itemsize < 4 else parameter.dtype
            total = grads[0].to(wide)
            for grad in grads[1:]:
                total = total + grad.to(wide)
            parameter.grad = (total / len(grads)).to(parameter.dtype)
        optimizer.step()
    assert found == [[_bits(each) for each in reference.parameters()]] * 3


def test_a_shard_that_nobody_holds_is_refused(threads: Callable[[int], Threads]) -> None:
    ended: dict[int, ParameterServer] = {}

    def first(comm: Communicator) -> None:
        with ParameterServer(Mixed(), _sgd, comm=comm, servers=2) as ps:
            ended[comm.rank] = ps

    def second(comm: Communicator) -> None:
        previous = ended[0] if comm.rank == 0 else None
        with pytest.raises(ValueError, match="a rank that holds shard 1 of 2, found none"):
            ParameterServer(Mixed(), _sgd, comm=comm, servers=2, previous=previous)

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
                ParameterServer(Mixed(), _sgd, comm=comm, **options)
        frozen = Mixed().requires_grad_(False)
        with pytest.raises(ValueError, match="a parameter that requires a gradient, found none"):
            ParameterServer(frozen, _sgd, comm=comm)
        with pytest.raises(ValueError, match="staleness: expected the same value on all ranks"):
            ParameterServer(Mixed(), _sgd, comm=comm, staleness=comm.rank)
        with pytest.raises(ValueError, match=r"found \['weight: 4 float32'\] on rank 0 and"):
            model = nn.Linear(4, 1 + comm.rank, bias=False)
            ParameterServer(model, _sgd, comm=comm)
        ps = ParameterServer(Mixed(), _sgd, comm=comm)
        with pytest.raises(ValueError, match=f"serve: rank {comm.rank} is a worker"):
            ps.serve()
        ps.close()
        ps.close()  # a second time
        with pytest.raises(ValueError, match="is closed: make a new one"):
            ps.step()

    threads(2).run(check)


def test_an_error_of_the_optimizer_ends_the_training_of_all(
    threads: Callable[[int], Threads],
) -> None:
    class Failing(_Identity):
        def step(self, closure: Any = None) -> None:
            raise ZeroDivisionError("in the optimizer")

    def check(comm: Communicator) -> Any:
        model = Mixed()
        ps = ParameterServer(model, Failing, comm=comm, servers=[1])
        _gradients(model, comm.rank, 0)
        with pytest.raises((ZeroDivisionError, AbortedError)) as caught, ps:
            ps.step()
        return type(caught.value).__name__, str(caught.value)

    first, second = threads(2).run(check)
    assert second == ("ZeroDivisionError", "in the optimizer")
    assert first[0] == "AbortedError"
    assert "the parameter server failed: ZeroDivisionError: in the optimizer" in first[1]


def test_a_late_worker_is_named(threads: Callable[[int], Threads]) -> None:
    told = threading.Barrier(3)

    def check(comm: Communicator) -> Any:
        model = Mixed()
        before, comm.timeout_s = comm.timeout_s, 1.0
        try:
            ps = ParameterServer(model, _sgd, comm=comm, servers=[2])
        finally:
            comm.timeout_s = before
        _gradients(model, comm.rank, 0)
        if comm.rank == 1:
            told.wait(limit_s(20))
        with pytest.raises(CollectiveTimeoutError) as caught, ps:
            ps.step()
        if comm.rank != 1:
            told.wait(limit_s(20))
        return str(caught.value)

    texts = threads(3).run(check)
    for text in texts:
        assert "has waited 1 s (timeout) for the parameters after step 0" in text
        assert "workers [1] have not pushed theirs" in text


def test_a_dedicated_server_has_no_steps() -> None:
    def check(comm: Communicator) -> None:
        model = Mixed()
        with ParameterServer(model, _sgd, comm=comm, dedicated=True) as ps:
            if ps.is_worker:
                _train(ps, model, comm.rank, 1)
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
        ParameterServer(model, _identity, comm=comm) as ps,
    ):
        _gradients(model, 0, 0)
        ps.step()
        assert ps.stats().sent_bytes == 0
    for parameter in model.parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter, parameter.grad)
