"""Checkpoints that one layout writes and another layout reads. Training continues as in one
process.
"""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from parallel.worlds.layout_training import (
    STEPS,
    expert_shape,
    small_shape,
    token_batches,
    train_alone,
)
from parallel.worlds.loaded_blocks import load_blocks
from parallel.worlds.traced_models import TracedDecoder
from unisono.parallel import Layout
from unisono.parallel.checkpoint import TensorBlock, save_blocks
from unisono.parallel.layers import CrossEntropy, TransformerModel
from unisono.parallel.run import ParallelRun, parallelize

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
# The next layout reads each layout's checkpoint. test_checkpoint_pairs.py has all pairs of others.
LAYOUTS = (
    "dp=4,zero=1",
    "dp=4,zero=3",
    "dp=2,tp=2,zero=3",
    "tp=2,pp=2",
    "dp=2,pp=2,zero=1",
    "tp=4,tensor=2d",
)


# The next layout reads each layout's checkpoint. With ZeRO, two ranks divide each expert, or an
# expert stays whole.
EXPERT_LAYOUTS = (
    "dp=4,ep=2,zero=3",
    "dp=4,ep=2,zero=1",
    "tp=4,ep=2,zero=3",
    "dp=2,pp=2,ep=2,zero=2",
)


def test_layout_checkpoint(outcome):
    outcome.require_success()


def adam(parameters):
    return torch.optim.AdamW(parameters, 1e-2)


def a_run(text: str, **changes: Any) -> ParallelRun:
    torch.set_default_dtype(torch.float64)
    shape = small_shape(**changes)
    return parallelize(
        TransformerModel(shape, seed=1),
        Layout.parse(text),
        loss=CrossEntropy(shape.vocab),
        optimizer=adam,
        microbatches=2,
    )


def shared_folder() -> Path:
    """Returns the path of one new folder, which all ranks use."""
    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names, src=0)
    return Path(names[0])


def losses_alone(steps: int, **changes: Any) -> list[float]:
    torch.set_default_dtype(torch.float64)
    shape = small_shape(**changes)
    batches = [token_batches(shape)[step % STEPS] for step in range(steps)]
    model = TransformerModel(shape, seed=1)
    return train_alone(model, CrossEntropy(), batches, None, make_optimizer=adam)[0]


def train(run: ParallelRun, steps: int) -> list[float]:
    batches = token_batches(small_shape())
    return [float(run.step(*batches[run.steps % STEPS])) for _ in range(steps)]


def own_layouts_read_each_other(world):
    require_equal_losses(LAYOUTS, layers=2)


def own_layouts_with_experts_read_each_other(world):
    require_equal_losses(EXPERT_LAYOUTS, **expert_shape(experts=2, layers=2))


def require_equal_losses(layouts: tuple[str, ...], **changes: Any) -> None:
    """Fails if training does not continue as in one process, from the previous layout's
    checkpoint.
    """
    expected = losses_alone(4, **changes)
    for source, target in pairwise((*layouts, layouts[0])):
        folder = shared_folder()
        first, run = a_run(source, **changes), a_run(target, **changes)
        assert train(first, 2) == pytest.approx(expected[:2], rel=1e-11)
        first.save(folder)
        run.load(folder)
        assert train(run, 2) == pytest.approx(expected[2:], rel=1e-11), (source, target)
        first.mesh.close()
        run.mesh.close()


def own_traced_model_reads_and_writes_any_layout(world):
    torch.set_default_dtype(torch.float64)
    batches = token_batches(small_shape())

    def traced_run(text):
        return parallelize(
            TracedDecoder(vocab=11, positions=12),
            Layout.parse(text),
            loss=CrossEntropy(11),
            optimizer=adam,
            microbatches=2,
            example=batches[0][0],
        )

    def losses(run, steps):
        return [float(run.step(*batches[run.steps % STEPS])) for _ in range(steps)]

    whole = traced_run("dp=4")
    expected = losses(whole, 3)
    names = {held.name for each in whole.sets for held in each.held}
    for source, target in (
        ("pp=4,schedule=gpipe", "dp=4,zero=1"),
        ("dp=4", "dp=2,pp=2,vpp=2,zero=1"),
    ):
        folder = shared_folder()
        first = traced_run(source)
        assert losses(first, 1) == pytest.approx(expected[:1], rel=1e-11)
        first.save(folder)
        second = traced_run(target)
        second.load(folder)
        assert losses(second, 2) == pytest.approx(expected[1:], rel=1e-11), (source, target)
    held = [None] * RANKS
    pipeline = traced_run("pp=4,schedule=gpipe")
    own = {held.name for each in pipeline.sets for held in each.held}
    dist.all_gather_object(held, own)
    assert set().union(*held) == names


def frozen_first(seed):
    """Returns a decoder whose first layer is frozen, with a buffer, and different for each seed."""
    model = TransformerModel(small_shape(layers=2), seed=seed)
    model.get_submodule("layer0").requires_grad_(False)
    model.get_submodule("layer0").register_buffer("mark", torch.full((3,), float(seed)))
    return model


def own_untrained_parts_and_the_first_states(world):
    """Tests that a checkpoint from before the first step changes no training, and that it holds
    frozen parameters and buffers. The first states of these optimizers are not zero.
    """
    torch.set_default_dtype(torch.float64)
    shape, folder = small_shape(), shared_folder()
    batches = [token_batches(shape)[step % STEPS] for step in range(3)]
    for make_optimizer, texts in (
        (lambda parameters: torch.optim.Rprop(parameters, 1e-3), ("dp=4,zero=3",)),
        (lambda parameters: torch.optim.NAdam(parameters, 1e-2, eps=1e-3), ("dp=2,pp=2",)),
        (
            lambda parameters: torch.optim.Adagrad(parameters, 0.1, initial_accumulator_value=0.1),
            ("dp=4,zero=1", "dp=4,zero=3"),
        ),
    ):
        expected, _ = train_alone(frozen_first(1), CrossEntropy(), batches, 0.5, make_optimizer)
        for text in texts:
            for seed in (1, 2):  # the second run loads what the first saved
                run = parallelize(
                    frozen_first(seed),
                    Layout.parse(text),
                    loss=CrossEntropy(shape.vocab),
                    optimizer=make_optimizer,
                    microbatches=2,
                    clip=0.5,
                )
                if seed == 1:
                    run.save(folder)
                else:
                    run.load(folder)
                losses = [float(run.step(*batch)) for batch in batches]
                assert losses == pytest.approx(expected, rel=1e-12), (text, seed)
                report = run.report()  # shards of ZeRO-3 are uneven
                weights = report.predicted.memory["weights"]
                assert report.memory["weights"] == pytest.approx(weights, rel=0.1)
                for _, stage in run.stages:
                    for name, buffer in stage.named_buffers():
                        assert (buffer == 1).all(), name
                run.mesh.close()


def own_what_cannot_train_is_refused(world):
    def refused(match, *, model=None, loss=None, optimizer=adam, text="dp=4", clip=None):
        with pytest.raises(ValueError, match=match):
            parallelize(
                model or TransformerModel(small_shape()),
                Layout.parse(text),
                loss=loss or CrossEntropy(),
                optimizer=optimizer,
                clip=clip,
            )

    refused("clip: expected a norm above 0, got -1", clip=-1)
    for unreduced in (
        torch.nn.MSELoss(reduction="none"),
        partial(torch.nn.functional.cross_entropy, reduction="none"),
    ):
        refused("a mean or a sum, got reduction = 'none'; return .sum, weight.", loss=unreduced)
    refused("0: BatchNorm1d averages", model=torch.nn.Sequential(torch.nn.BatchNorm1d(4)))
    refused("zero = 1 .* got Adafactor", optimizer=torch.optim.Adafactor, text="dp=4,zero=1")
    run = a_run("dp=4")
    run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match="arrays that parallelize gave it"):
        run.step(*token_batches(small_shape())[0])
    run.mesh.close()


def own_rectangles_of_any_cut(world):
    whole = torch.arange(7 * 6.0).view(7, 6)
    folder, rank = shared_folder(), world.rank
    rows = [0, 3, 3, 5, 7]  # rank 1 has no rows
    saved = TensorBlock(
        name="w", shape=(7, 6), start=(rows[rank], 0), values=whole[rows[rank] : rows[rank + 1]]
    )
    step = TensorBlock(name="step", shape=(), start=(), values=torch.tensor(5))
    save_blocks(folder, [saved, step], extra={"steps": 3})
    columns = TensorBlock(name="w", shape=(7, 6), start=(0, rank), values=torch.zeros(7, 2))
    again = TensorBlock(name="step", shape=(), start=(), values=torch.tensor(0))
    assert load_blocks(folder, [columns, again]) == {"steps": 3}
    assert torch.equal(columns.values, whole[:, rank : rank + 2]) and int(again.values) == 5
    if rank == 0:  # torch can also read the checkpoint without unisono
        path = next(folder.glob("checkpoint-*"))
        dcp_to_torch_save(path, folder / "whole.pt")
        assert torch.equal(torch.load(folder / "whole.pt")["w"], whole)
    dist.barrier()


def own_what_does_not_fit_is_refused_before_a_change(world):
    folder = shared_folder()
    with pytest.raises(ValueError, match=r"no checkpoint in .*expected the file 'latest'"):
        load_blocks(folder, [])
    save_blocks(folder, [TensorBlock(name="w", shape=(3,), start=(0,), values=torch.ones(3))])
    kept = torch.zeros(3)
    for other, pattern in (
        (TensorBlock(name="x", shape=(3,), start=(0,), values=kept), "has no tensor 'x'"),
        (TensorBlock(name="w", shape=(4,), start=(0,), values=kept), r"expected the shape \(4,\)"),
        (
            TensorBlock(name="w", shape=(3,), start=(0,), values=torch.ones(3).int()),
            "expected torch.int32",
        ),
    ):
        good = TensorBlock(name="w", shape=(3,), start=(0,), values=kept)
        with pytest.raises(ValueError, match=pattern):
            load_blocks(folder, [good, other])
    assert torch.equal(kept, torch.zeros(3))
    dist.barrier()


def own_misfit_on_one_rank_is_refused_on_all(world):
    """Tests blocks of which only the last rank has one that does not fit, as in a pipeline."""
    folder, rank = shared_folder(), world.rank
    save_blocks(folder, [TensorBlock(name="w", shape=(3,), start=(0,), values=torch.ones(3))])
    kept = torch.zeros(3)
    good = TensorBlock(name="w", shape=(3,), start=(0,), values=kept)
    other = TensorBlock(name="x", shape=(3,), start=(0,), values=kept)
    with pytest.raises(ValueError, match="has no tensor 'x'"):
        load_blocks(folder, [good, other] if rank == RANKS - 1 else [good])
    assert torch.equal(kept, torch.zeros(3))
    load_blocks(folder, [good] if rank == RANKS - 1 else [])
    dist.barrier()


def own_larger_model_is_refused(world):
    folder = shared_folder()
    run = a_run("dp=2,pp=2,zero=1", layers=3)
    run.save(folder)
    run.mesh.close()
    for text in ("pp=2,tp=2", "dp=4"):
        run = a_run(text, layers=2)
        with pytest.raises(ValueError, match=r"has 'layer2\..*', which this model does not have"):
            run.load(folder)
        run.mesh.close()
    dist.barrier()


def own_folders_of_other_programs_are_kept(world):
    folder = shared_folder()
    others = [folder / "checkpoint-500" / "model.bin", folder / "checkpoint-best" / "extra.json"]
    interrupted = folder / "checkpoint-3"
    if world.rank == 0:
        interrupted.mkdir()
        (interrupted / "__0_0.distcp").touch()
        for each in others:
            each.parent.mkdir()
            each.touch()
        (folder / "checkpoint-best" / "parts").mkdir()
    dist.barrier()
    for _ in range(2):
        save_blocks(folder, [TensorBlock(name="w", shape=(3,), start=(0,), values=torch.ones(3))])
    names = sorted(path.name for path in folder.glob("checkpoint-*"))
    assert names == ["checkpoint-500", "checkpoint-502", "checkpoint-best"]
    assert all(each.is_file() for each in others)
    dist.barrier()


def own_incomplete_checkpoint_is_refused(world):
    folder = shared_folder()
    if world.rank == 0:
        (folder / "latest").write_text("checkpoint-7")
    dist.barrier()
    with pytest.raises(ValueError, match=r"names 'checkpoint-7': expected a complete checkpoint"):
        load_blocks(folder, [])
    dist.barrier()
