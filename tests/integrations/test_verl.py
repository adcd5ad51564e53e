"""verl's checkpoint engine `unisono`, as verl's manager drives it, with threads for its workers."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("verl")

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

from unisono.errors import PeerLostError

pytestmark = pytest.mark.torch
BUCKET_BYTES = 4000


@pytest.fixture(autouse=True)
def backend():
    import_external_libs("unisono.integrations.verl_engine")
    return CheckpointEngineRegistry.get("unisono")


def weights(step):
    """Yields tensors as a trainer's generator does, in memory that it uses again."""
    memory = torch.empty(3000)
    for number, count in enumerate((10, 3000, 500, 600, 7)):
        tensor = memory[:count].fill_(step + number)
        yield f"layer.{number}", tensor
    yield "half", torch.full((2, 3), step, dtype=torch.bfloat16)


def values_of(step):
    return {name: tensor.tolist() for name, tensor in weights(step)}


async def received(engine):
    return {name: each.tolist() async for name, each in engine.receive_weights()}


def update(trainer, rollout, step, source=weights):
    """Does what `CheckpointEngineManager.update_weights` does; returns the results of the ranks."""
    metadata = [each.prepare() for each in (*trainer, *rollout)]
    kind = type(trainer[0])
    topology = kind.build_topology(len(trainer), len(rollout), metadata)
    for engines, arguments in zip((trainer, rollout), topology, strict=True):
        assert {len(each) for each in arguments.values()} == {len(engines)}
    with ThreadPoolExecutor() as pool:
        for engines, arguments in zip((trainer, rollout), topology, strict=True):
            for rank, each in enumerate(engines):
                each.init_process_group(**{name: of[rank] for name, of in arguments.items()})
        calls = [each.send_weights(source(step), global_steps=step) for each in trainer]
        calls += [received(each) for each in rollout]
        futures = [pool.submit(asyncio.run, call) for call in calls]
        outcomes = [each.exception(60) or each.result() for each in futures]
    for each in (*trainer, *rollout):
        each.finalize()
    return outcomes[len(trainer) :]


def make(count, **options):
    made = [
        CheckpointEngineRegistry.new("unisono", bucket_size=BUCKET_BYTES, **options)
        for _ in range(count)
    ]
    assert all(isinstance(each, CheckpointEngine) for each in made)
    return made


def test_replicas_come_and_go_between_updates():
    trainer = make(1, is_master=True) + make(1)
    first, second, third = make(3)
    for step, rollout in enumerate(([first, second], [first, second, third], [third], [first])):
        assert update(trainer, rollout, step) == [values_of(step)] * len(rollout)


def test_a_trainer_that_fails_is_told():
    def broken(step):
        yield "first", torch.ones(2000)
        yield "second", torch.ones(2000)
        raise OSError("the disk is gone")

    trainer, rollout = make(1, is_master=True), make(2)
    outcomes = update(trainer, rollout, 0, broken)
    assert [type(each) for each in outcomes] == [PeerLostError] * 2


def test_a_worker_without_a_connection_says_so():
    with pytest.raises(PeerLostError, match="call init_process_group"):
        asyncio.run(received(make(1)[0]))
