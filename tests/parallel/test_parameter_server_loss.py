"""The loss of workers and servers: real processes are killed during training."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from ranks import Me, Processes  # noqa: E402
from unisono import PeerLostError  # noqa: E402
from unisono.parallel import ParameterServer  # noqa: E402

pytestmark = pytest.mark.torch

# An optimizer imports torch._dynamo. If each rank did so, the ranks would take a minute on a busy
# machine.
Ranks = partial(Processes, modules=["torch._dynamo", "unisono.parallel.parameter_server"])

ELEMENTS, STEPS, LOST_IN = 60, 8, 5
RANGE_BYTES = 80


def _gradient(rank: int, step: int) -> Any:
    return np.random.default_rng([rank, step]).normal(size=ELEMENTS)


def _sgd(params: Any) -> Any:
    return torch.optim.SGD(params, 0.1, momentum=0.5)


class DyingSgd(torch.optim.SGD):  # type: ignore[misc]
    """An optimizer that kills its process in step `LOST_IN`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.1, momentum=0.5)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        if self.steps == LOST_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        return super().step(closure)


def _train(
    me: Me,
    before_step: Callable[[int], None] = lambda step: None,
    optimizer: Callable[[Any], Any] = _sgd,
    **options: Any,
) -> None:
    torch.set_num_threads(1)
    model = nn.Linear(ELEMENTS, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    with (
        me.join() as comm,
        ParameterServer(model, optimizer, comm=comm, range_bytes=RANGE_BYTES, **options) as ps,
    ):
        if ps.is_worker:
            for step in range(STEPS):
                before_step(step)
                model.weight.grad = torch.from_numpy(_gradient(me.rank, step)).reshape(1, -1)
                ps.step()
        else:
            ps.serve()
        stats = ps.stats()
        me.say(
            "trained",
            values=model.weight.detach().flatten().tolist(),
            lost=stats.lost_ranks,
            updates=[str(each) for each in stats.lost_updates],
            steps=stats.steps,
            workers=ps.plan.workers,
            owners=ps.plan.owners,
        )


def _oracle(
    workers: Callable[[int], Sequence[int]], lost: range = range(0), part: slice = slice(None)
) -> Any:
    """Returns the values after training, computed by NumPy. In `part`, the updates of the `lost`
    steps are missing.
    """
    values, momentum = np.zeros(ELEMENTS), np.zeros(ELEMENTS)
    for step in range(STEPS):
        grads = [_gradient(rank, step) for rank in workers(step)]
        mean = sum(grads[1:], start=grads[0]) / len(grads)
        new_momentum = 0.5 * momentum + mean
        new_values = values - 0.1 * new_momentum
        if step in lost:
            new_momentum[part], new_values[part] = momentum[part], values[part]
        values, momentum = new_values, new_momentum
    return values


def _require(found: Sequence[dict[str, Any]], expected: Any) -> None:
    for said in found:
        np.testing.assert_allclose(said["values"], expected, rtol=1e-12, atol=1e-12)


# ---- a worker


def loses_a_worker(me: Me) -> None:
    def die(step: int) -> None:
        if (me.rank, step) == (2, LOST_IN):
            os.kill(os.getpid(), signal.SIGKILL)

    _train(me, die, servers=[0, 3])


def test_the_others_go_on_without_a_worker() -> None:
    with Ranks(loses_a_worker, 4) as ranks:
        found = ranks.wait_for("trained", [0, 1, 3])
        assert ranks.exit_codes() == [0, 0, -signal.SIGKILL, 0]
    _require(found, _oracle(lambda step: range(4) if step < LOST_IN else (0, 1, 3)))
    for said in found:
        assert (said["lost"], said["updates"], said["steps"]) == ([2], [], STEPS)
        assert (said["workers"], said["owners"]) == ([0, 1, 3], [0, 3])


def loses_a_worker_at_any_time(me: Me) -> None:
    def die(step: int) -> None:
        if (me.rank, step) == (1, LOST_IN):
            delay_s = np.random.default_rng(os.getpid()).uniform(0, 0.004)
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    _train(me, die, servers=[3], dedicated=True)


def test_the_others_agree_wherever_a_worker_dies() -> None:
    with Ranks(loses_a_worker_at_any_time, 4) as ranks:
        found = ranks.wait_for("trained", [0, 2])
        ranks.wait_for("trained", [3])
        assert ranks.exit_codes()[1] == -signal.SIGKILL
    _require(found, found[0]["values"])


def loses_a_worker_asynchronously(me: Me) -> None:
    def die(step: int) -> None:
        if (me.rank, step) == (2, LOST_IN):
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    model = nn.Linear(ELEMENTS, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    plain = lambda params: torch.optim.SGD(params, 1.0)  # noqa: E731
    options: dict[str, Any] = {"servers": [0], "staleness": 1, "range_bytes": RANGE_BYTES}
    with me.join() as comm:
        ps = ParameterServer(model, plain, comm=comm, **options)
        for step in range(STEPS):
            die(step)
            model.weight.grad = torch.full((1, ELEMENTS), 100.0**me.rank, dtype=torch.float64)
            ps.step()
        ps.close()
        values = [s.values.view(torch.float64).tolist() for s in ps._group.shards.values()]
        me.say("trained", values=values, most_missed=ps.stats().most_missed)


def test_bounded_staleness_goes_on_without_the_slowest() -> None:
    with Ranks(loses_a_worker_asynchronously, 3) as ranks:
        first, second = ranks.wait_for("trained", [0, 1])
    assert first["values"] == [[-(STEPS + 100.0 * STEPS + 10_000.0 * LOST_IN)] * ELEMENTS]
    assert second["values"] == []
    assert first["most_missed"] <= 2


# ---- a server

FOLDER = "SNAPSHOT_FOLDER_OF_TEST"


def _snapshots() -> dict[str, Any]:
    return {"snapshot_every": 2, "snapshot_folder": os.environ[FOLDER]}


def loses_a_dedicated_server(me: Me) -> None:
    optimizer = DyingSgd if me.rank == 4 else _sgd
    _train(me, optimizer=optimizer, servers=[3, 4], dedicated=True, **_snapshots())


def test_a_lost_shard_comes_from_its_snapshot(tmp_path: Path) -> None:
    environment = {FOLDER: str(tmp_path)}
    with Ranks(loses_a_dedicated_server, 5, environment=lambda rank: environment) as ranks:
        found = ranks.wait_for("trained", [0, 1, 2])
        (server,) = ranks.wait_for("trained", [3])
        assert ranks.exit_codes() == [0, 0, 0, 0, -signal.SIGKILL]
    # The snapshot has steps 0 to 3. Step 4 is lost. Step 5 is pushed again.
    second_half = slice(ELEMENTS // 2, None)
    _require(found, _oracle(lambda step: (0, 1, 2), range(4, LOST_IN), second_half))
    for said in (*found, server):
        assert (said["lost"], said["owners"]) == ([4], [3, 3])
        assert said["updates"] == [
            "rank 4, the server of shard 1, was lost; rank 3 goes on with bytes 240 to 480 "
            "(weight) from the snapshot after 4 steps: the update of step 4 is lost"
        ]


def loses_a_worker_that_serves(me: Me) -> None:
    optimizer = DyingSgd if me.rank == 1 else _sgd
    _train(me, optimizer=optimizer, servers=3, **_snapshots())


def test_a_rank_that_works_and_serves_is_lost(tmp_path: Path) -> None:
    environment = {FOLDER: str(tmp_path)}
    with Ranks(loses_a_worker_that_serves, 3, environment=lambda rank: environment) as ranks:
        found = ranks.wait_for("trained", [0, 2])
        assert ranks.exit_codes()[1] == -signal.SIGKILL
    # The lost worker's own shard has lost step 4. Other shards may have applied its push of step 5.
    for said in found:
        assert (said["workers"], said["lost"]) == ([0, 2], [1])
        assert said["owners"][0] == 0 and said["owners"][2] == 2
        assert said["updates"][0].endswith("the update of step 4 is lost")
    _require(found, found[0]["values"])
    middle = slice(ELEMENTS // 3, 2 * ELEMENTS // 3)
    expected = _oracle(
        lambda step: range(3) if step < LOST_IN else (0, 2), range(4, LOST_IN), middle
    )
    np.testing.assert_allclose(found[0]["values"][middle], expected[middle], rtol=1e-12)


def loses_all_servers(me: Me) -> None:
    optimizer = DyingSgd if me.rank == 2 else _sgd
    _train(me, optimizer=optimizer, servers=[2], dedicated=True, **_snapshots())


def test_a_worker_becomes_the_server(tmp_path: Path) -> None:
    environment = {FOLDER: str(tmp_path)}
    with Ranks(loses_all_servers, 3, environment=lambda rank: environment) as ranks:
        found = ranks.wait_for("trained", [0, 1])
        assert ranks.exit_codes() == [0, 0, -signal.SIGKILL]
    _require(found, _oracle(lambda step: (0, 1), range(4, LOST_IN)))
    assert [said["owners"] for said in found] == [[0], [0]]


def loses_a_server_without_snapshots(me: Me) -> None:
    optimizer = DyingSgd if me.rank == 1 else _sgd
    me.attempt("ended", lambda: _train(me, optimizer=optimizer, servers=[0, 1]))


def test_a_lost_shard_without_a_snapshot_is_an_error() -> None:
    with Ranks(loses_a_server_without_snapshots, 3) as ranks:
        for said in ranks.wait_for("ended", [0, 2]):
            assert said["error"] == PeerLostError.__name__
            assert "ranks [1] were lost, with the parameters and the optimizer of" in said["text"]
            assert "bytes 240 to 480 (weight)" in said["text"]
            assert "Give snapshot_every, and a snapshot_folder" in said["text"]


def loses_two_ranks_one_after_the_other(me: Me) -> None:
    def die(step: int) -> None:
        if (me.rank, step) in ((0, 2), (3, LOST_IN)):
            os.kill(os.getpid(), signal.SIGKILL)

    _train(me, die, servers=[0, 3], **_snapshots())


def test_two_losses_one_after_the_other(tmp_path: Path) -> None:
    environment = {FOLDER: str(tmp_path)}
    function = loses_two_ranks_one_after_the_other
    with Ranks(function, 4, environment=lambda rank: environment) as ranks:
        found = ranks.wait_for("trained", [1, 2])
        assert ranks.exit_codes() == [-signal.SIGKILL, 0, 0, -signal.SIGKILL]
    for said in found:
        assert (said["lost"], said["workers"]) == ([0, 3], [1, 2])
        # lost updates: of shard 0 at the first loss, of both shards of rank 3 at the second loss
        assert len(said["updates"]) == 3
        assert set(said["owners"]) <= {1, 2}
    _require(found, found[0]["values"])


def loses_a_worker_while_another_waits_in_close(me: Me) -> None:
    torch.set_num_threads(1)
    model = nn.Linear(4, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    plain = lambda params: torch.optim.SGD(params, 1.0)  # noqa: E731
    with me.join() as comm, ParameterServer(model, plain, comm=comm, servers=[0]) as ps:
        for step in range((1, 3, 5)[me.rank]):
            if (me.rank, step) == (1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            model.weight.grad = torch.full((1, 4), 1.0 + me.rank, dtype=torch.float64)
            ps.step()
        ps.close()
        me.say("trained", values=model.weight.detach().flatten().tolist())


def test_a_finished_worker_still_serves_after_a_loss() -> None:
    with Ranks(loses_a_worker_while_another_waits_in_close, 3) as ranks:
        first, last = ranks.wait_for("trained", [0, 2])
    assert first["values"] == [-2.0] * 4  # a step with the mean of 1, 2 and 3
    assert last["values"] == [-(2.0 + 2.5 + 3 * 3.0)] * 4
