"""Deliberate errors in layouts: the comparison with one process must find each of them.

Each error changes the loss or the norm of the gradients, which are equal on all ranks. So all ranks
fail in the same step.
"""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

from parallel.worlds.layout_training import chain, compare_passes, compare_transformer, expert_shape
from unisono.parallel import Layout
from unisono.parallel.layers import mixture_of_experts, tensor_1d
from unisono.parallel.layers.layout_dropout import LayoutDropout
from unisono.parallel.layers.tensor_1d import Tensor1D
from unisono.parallel.run.batch import batch_parts
from unisono.parallel.run.loss.batch_loss import BatchLoss
from unisono.parallel.run.parameters import flat_sets
from unisono.parallel.run.parameters.flat_sets import ShardedSet, WholeSet
from unisono.parallel.run.pipeline import pipeline_runner
from unisono.parallel.run.step.pass_context import PassContext

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
REDUCE = WholeSet.reduce
REPLICAS = flat_sets.replicas
KIND = pipeline_runner.schedule_class
DIVIDE_FACTOR = FSDPModule.set_gradient_divide_factor


def test_layout_mutations(outcome):
    outcome.require_success()


def require_failure(owner, name, wrong, text, **changes):
    """Replaces an attribute by a wrong one. Fails if the comparison of a layout does not fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrong)
        try:
            compare_transformer(text, **changes)
        except AssertionError:
            return
    pytest.fail(f"{text}: no comparison failed with a wrong {name}")


def own_a_dropped_sum(world):
    def collect(held):
        held._flat.collect()

    require_failure(WholeSet, "reduce", collect, "dp=2,tp=2")
    require_failure(WholeSet, "reduce", collect, "cp=2,pp=2", microbatches=2)
    require_failure(Tensor1D, "leave", lambda held, x: x, "dp=2,tp=2")
    require_failure(tensor_1d, "copy_to_all", lambda x, group: x, "dp=2,tp=2")
    # the norms and biases between layers, whose ranks see different tokens
    text = "dp=2,tp=2,sequence_parallel=1"
    require_failure(Tensor1D, "divide_between", lambda held, module, name: None, text)


def own_a_dropped_sum_over_a_tie(world):
    def without_tie(held):
        held._tie = None
        REDUCE(held)

    require_failure(WholeSet, "reduce", without_tie, "dp=2,pp=2", microbatches=4)


def own_a_dropped_sum_over_replicas(world):
    reduce = ShardedSet.reduce

    def without_others(held):
        held._others = []
        reduce(held)

    require_failure(ShardedSet, "reduce", without_others, "dp=4,zero=1,dp_replicate=2")


def own_gradients_of_experts_divided_by_the_ranks_that_hold_them(world):
    def averaged(held):
        REDUCE(held)
        if held._summed_over == "expert_tokens":
            held._flat.gradient.div_(dist.get_world_size(held._group))

    require_failure(WholeSet, "reduce", averaged, "dp=4,ep=2", **expert_shape())


def own_gradients_divided_by_the_ranks(world):
    def averaged(held):
        REDUCE(held)
        held._flat.gradient.div_(dist.get_world_size(held._group))

    require_failure(WholeSet, "reduce", averaged, "dp=4")
    require_failure(
        FSDPModule,
        "set_gradient_divide_factor",
        lambda module, factor: DIVIDE_FACTOR(module, 4.0),
        "dp=4,zero=3",
        tied=False,
    )


def own_a_replica_counted_twice(world):
    def wrong(held, mesh):
        return REPLICAS(held, mesh) / (2 if held.block.held_by == "stage" else 1)

    require_failure(flat_sets, "replicas", wrong, "dp=2,tp=2")
    require_failure(flat_sets, "replicas", wrong, "dp=2,ep=4,tp=2,zero=1", **expert_shape())

    def without_tie(held, mesh):
        return len(mesh.ranks(held.block.held_by))

    text = "dp=2,pp=2,zero=1"
    require_failure(flat_sets, "replicas", without_tie, text, microbatches=4)


def own_means_of_unequal_parts(world):
    def mean(loss, output, part):
        return loss._loss(output, part.targets) / loss._parts

    require_failure(BatchLoss, "part", mean, "dp=4")
    require_failure(BatchLoss, "part", mean, "tp=2,pp=2", microbatches=4)


def own_gradients_scaled_by_the_schedule(world):
    def scaling(layout):
        kind = KIND(layout)
        return lambda *stages, **options: kind(*stages, **options | {"scale_grads": True})

    require_failure(pipeline_runner, "schedule_class", scaling, "dp=2,pp=2", microbatches=4)


def own_positions_cut_in_order(world):
    def in_order(length, rank, ranks):
        return torch.arange(length).tensor_split(ranks)[rank]

    require_failure(batch_parts, "zigzag_part", in_order, "dp=2,cp=2")


def own_loads_of_a_part_of_a_sequence(world):
    def of_part(scores, chosen, *, groups, length):
        return balance(scores, chosen, groups=(), length=length)

    balance = mixture_of_experts.balance_loss
    changes = expert_shape()
    require_failure(mixture_of_experts, "balance_loss", of_part, "dp=2,cp=2,ep=4", **changes)


def own_equal_masks_on_all_ranks(world):
    def first_samples(dropout, samples):
        return 0

    text = "tp=4,tensor=2d"
    require_failure(LayoutDropout, "_samples_before", first_samples, text, dropout=0.3)
    require_failure(PassContext, "_enter", lambda context, number: None, "dp=4", dropout=0.3)


def own_a_swapped_entry_of_a_schedule(world):
    """Exchanges the last two passes for gradients of weights on the last rank."""
    run = chain(Layout(dp=2, pp=2, schedule="zb1p"), 4)
    run.step(torch.ones(8, 3), torch.zeros(8, 3))
    compare_passes(run)
    order = run._passes.pipeline._schedule.pipeline_order_with_comms[1]  # ends with two such passes
    *_, first, second = (
        place for place, action in enumerate(order) if action.computation_type.value == "W"
    )
    order[first], order[second] = order[second], order[first]
    run.step(torch.ones(8, 3), torch.zeros(8, 3))
    with pytest.raises(AssertionError):
        compare_passes(run)
