"""The division of a model by a layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch import nn

from unisono.parallel.divisible.interfaces import Balanced, has_divisible
from unisono.parallel.divisible.parameter_block import block_of
from unisono.parallel.layers import CrossEntropy, MixtureOfExperts, SelfAttention
from unisono.parallel.meta_weights import InitialValues, give_memory
from unisono.parallel.precision import (
    Precision,
    cast_inputs,
    convert_parameters,
    required_precision,
)
from unisono.parallel.run.activation_checks import check_activations
from unisono.parallel.run.batch.divided_call import make_call
from unisono.parallel.run.batch.model_call import Call
from unisono.parallel.run.divided_model import DividedModel
from unisono.parallel.run.files.hyperparameters import group_names
from unisono.parallel.run.files.run_weights import ModelFiles, RunWeights
from unisono.parallel.run.loss.batch_loss import Loss, stated_weight
from unisono.parallel.run.loss.own_loss import model_loss
from unisono.parallel.run.model_checks import check_loss_parameters, check_modules, check_torch
from unisono.parallel.run.parallel_run import ParallelRun
from unisono.parallel.run.parameters.built_optimizers import (
    FormerParameters,
    MakeNamedOptimizer,
    MakeOptimizer,
    build_optimizers,
    check_functions,
    check_optimizers,
    merge_parameters,
    unmerged_parameters,
)
from unisono.parallel.run.parameters.fully_sharded_set import make_sets, shard_modules
from unisono.parallel.run.parameters.gathered_module import CallOrder, GatheredModule
from unisono.parallel.run.parameters.gradient_hooks import GradientHooks, take_hooks
from unisono.parallel.run.parameters.gradient_sums import GradientSums
from unisono.parallel.run.parameters.parameter_sets import HeldParameter
from unisono.parallel.run.parameters.tied_parameters import NamedParameters
from unisono.parallel.run.pipeline.all_stages import all_stages, blocks_to_cut, first_microbatch
from unisono.parallel.run.pipeline.model_stages import stages_of_rank
from unisono.parallel.run.pipeline.schedules import check_count
from unisono.parallel.run.planned_division import divide_model, plan_of_all_ranks, planned_precision
from unisono.parallel.run.rank_agreement import on_all_ranks, require_equal
from unisono.parallel.tensor_plan import ModelPlan, StyleName
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import Layout


def parallelize(
    model: nn.Module | ModelPlan,
    layout: Layout | None = None,
    *,
    loss: Loss,
    optimizer: MakeOptimizer | None = None,
    named_optimizer: MakeNamedOptimizer | None = None,
    microbatches: int = 1,
    clip: float | None = None,
    example: Any = None,
    call: Call | None = None,
    weight: Callable[..., Any] | None = None,
    batch: Literal["global", "local"] = "global",
    styles: Mapping[str, StyleName] | None = None,
    precision: Precision | None = None,
    weights: Path | str | None = None,
    overlap: bool | None = None,
) -> ParallelRun:
    """Divides a model over the ranks of torch's default group, and returns its training run.

    Call on all ranks with the same whole model; rank 0's weights are used. `loss` is a loss of
    torch, a function of output and targets that returns (sum, weight), or `model_loss`, the loss
    that the model computes itself: the loss of a batch is the sum of the sums of its parts over the
    sum of their weights. `weight`, a function of the targets or of (output, targets), states by
    what the mean of a part was divided, in place of a pair. If `step` receives one batch of any
    nesting, these functions get the batch as their targets. `call`, a function of (model, batch),
    computes the output, in place of a call as the signature of `forward` says. `batch`: "global" if
    each rank passes the whole batch, "local" if each rank of `dp` passes its own part.
    `optimizer` makes an optimizer, or several in a list, of the model's parameters;
    `named_optimizer`, in its place, makes them of pairs of name (in the whole model) and parameter,
    for groups by name. Parameters that they leave out are not trained. They may not have others.
    `clip`: largest norm of all gradients together, to which a larger norm is clipped. `example`:
    what `step` will receive first (inputs, or a batch of any nesting), for `pp` and a model that is
    not an `nn.Sequential`. Hooks of parameters (`register_hook`) are called once in a step, with
    the gradient of the whole batch. `precision`: the types of weights, activations and sums of
    gradients. `weights`: a file of safetensors, or a folder of them, of which each rank reads its
    part. Without it, a model on the device meta gets the values of its own `init_weights`, or of
    the `reset_parameters` of its modules, as in one process with the generator of rank 0; a rank
    has memory for its part only. `overlap`: the ranks sum gradients while backward passes still
    compute others; None: if the ranks of a sum are on several hosts. With ZeRO-2 and 3, torch
    always does this.
    The axes of a layout can divide:

    - `dp`, and ZeRO by `layout.zero`: any model.
    - `pp`: an `nn.Sequential`, which is cut between its modules. With `example`, also another model
      that torch.export can trace: its graph is cut between its operations. Batches then have the
      shape of `example`. Models that repeat a block are cut between their blocks if they cannot be
      traced, and with `tp` of any model, `cp` of any model, and ZeRO 2 and 3.
    - `tp`: modules with a method `divide(mesh)`, such as those of `TransformerModel`, pairs of
      `nn.Linear` in an `nn.Sequential`, models of transformers, and modules that `styles` names:
      see `plan`, whose result may replace `model` and `layout`. Every rank of `tp` computes the
      other modules.
    - `cp`: a model whose attention is torch's `scaled_dot_product_attention`, such as those of
      transformers; or one of modules with a method `divide(mesh)`, and others that treat each
      position alone, which a class declares by `is_per_position = True`.
    - `ep`: modules with stacked experts, as in models of transformers, and modules with a method
      `divide(mesh)`.

    The model is changed: it keeps this rank's part. Raises `ValueError`, with a reason in one line,
    for a layout that cannot divide the model, and `UnsupportedError` if torch is too old for `pp`
    or for `zero` above 1.

        layout = Layout(dp=2, tp=2, pp=2)
        run = parallelize(model, layout, loss=loss_fn, optimizer=adam, microbatches=4, clip=1.0)
        loss = run.step(inputs, targets)
    """
    _check_values(microbatches, clip, batch)
    types = _agreed(on_all_ranks(lambda: planned_precision(model, precision)), weights, overlap)
    check_functions(optimizer, named_optimizer)
    given = None if weight is None else stated_weight(weight)
    planned = plan_of_all_ranks(model, layout, styles)
    model, layout = planned.model, planned.layout
    parts = layout.dp * layout.cp * layout.pp * microbatches
    on_all_ranks(lambda: _check(model, layout, loss, parts, has_weight=weight is not None))
    # the caller may use the loss with another layout
    loss = copy.copy(loss) if isinstance(loss, CrossEntropy) else loss
    mesh = TrainingMesh(layout, head_copies=planned.head_copies, overlap=overlap)
    model_call = make_call(model, call, mesh, owns_loss=loss is model_loss and weight is None)
    files, former, hooks = ModelFiles.of(model), FormerParameters(model), take_hooks(model)
    initial, names = _share_values(model, types), NamedParameters(model)
    is_balanced = any(isinstance(each, Balanced) for each in model.modules())
    first = on_all_ranks(
        lambda: first_microbatch(
            model, layout, example, microbatches=microbatches, is_local=batch == "local"
        )
    )
    blocks = on_all_ranks(lambda: blocks_to_cut(planned, model_call, first))
    on_all_ranks(lambda: divide_model(planned, loss, mesh))
    _check_experts(model, layout)
    on_all_ranks(lambda: names.tie_again(model))
    cast_inputs(model, types)
    every = all_stages(
        model,
        layout,
        first,
        call=model_call,
        needs_loss=loss is model_loss and weight is None,
        blocks=blocks,
        precision=types,
    )
    own = stages_of_rank(layout, mesh.coordinates["pp"]) if layout.pp > 1 else [0]
    stages, calls = [(number, every[number]) for number in own], CallOrder()
    names.place(every, mesh)
    held, gathered = _divide_parameters(stages, mesh, names, calls, types)
    trained = [each for each in held if each.values.requires_grad]
    frozen = [each for each in held if not each.values.requires_grad]
    values = RunWeights(trained, frozen, [each for _, each in stages], mesh, files)
    _fill(values, initial, weights)
    built = on_all_ranks(
        lambda: build_optimizers(optimizer, named_optimizer, trained, frozen, former)
    )
    on_all_ranks(lambda: check_optimizers(built, trained, layout))
    sets = make_sets(trained, mesh, gathered, types, unmerged_parameters(built))
    sums = GradientSums(sets, stages, mesh)
    gradient_hooks = on_all_ranks(lambda: GradientHooks(hooks, sets, mesh))
    groups = group_names(built, trained)
    merge_parameters(built, sets)
    divided = DividedModel(
        mesh=mesh,
        precision=types,
        stages=stages,
        names=names.trained,
        sets=sets,
        frozen=frozen,
        gathered=gathered,
        calls=calls,
        optimizers=built,
        groups=groups,
        is_planned=planned.is_divided,
        is_balanced=is_balanced,
    )
    return ParallelRun(
        divided,
        weights=values,
        hooks=gradient_hooks,
        sums=sums,
        loss=loss,
        weight=given,
        call=model_call,
        microbatches=microbatches,
        clip=clip,
        is_local=batch == "local",
    )


def _agreed(
    precision: Precision | None, weights: Path | str | None, overlap: bool | None
) -> Precision:
    """Returns the precision, which all ranks must have. Collective."""
    require_equal(
        {
            "precision": repr(precision),
            "weights": "none" if weights is None else "a file",
            "overlap": repr(overlap),
        }
    )
    if not isinstance(overlap, bool | None):
        raise ValueError(f"overlap: expected True, False or None, got {overlap!r}")
    return required_precision(precision)


def _share_values(model: nn.Module, precision: Precision) -> InitialValues:
    """Gives all ranks the values of rank 0, in the type of the precision; returns how those on the
    device meta are computed. Collective."""
    initial = on_all_ranks(lambda: InitialValues(model))
    initial.require_equal()
    on_all_ranks(lambda: convert_parameters(model, precision))
    for buffer in model.buffers():
        if buffer.layout == torch.strided and 0 in buffer.stride():
            buffer.data = buffer.contiguous()  # elements of `expand` share memory
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta:
            dist.broadcast(tensor.detach(), src=0)
    return initial


def _fill(values: RunWeights, initial: InitialValues, weights: Path | str | None) -> None:
    """Gives what was on the device meta values, and all weights those of a file. Collective."""
    if initial.exist:
        on_all_ranks(lambda: values.compute(initial, has_file=weights is not None))
    if weights is not None:
        values.load(Path(weights), is_whole=initial.exist)


def _check_values(microbatches: int, clip: float | None, batch: str) -> None:
    check_count(microbatches)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip: expected a norm above 0, got {clip}")
    if batch not in ("global", "local"):
        raise ValueError(f"batch: expected 'global' or 'local', got {batch!r}")


def _check(model: nn.Module, layout: Layout, loss: Loss, parts: int, *, has_weight: bool) -> None:
    """Raises `ValueError` for models and losses that the layout cannot train as one process, and
    `UnsupportedError` if this torch cannot run the layout."""
    check_torch(layout)
    if layout.tensor != "1d":
        _check_grid(model, layout, loss)
    if layout.cp > 1 and loss is model_loss:
        shifts = (
            f"cp = {layout.cp} divides the positions of a sequence, which the model's own loss may "
            "shift"
        )
        if has_divisible(model):
            raise ValueError(
                f"{shifts}; expected a loss function of the output and of labels that are shifted "
                f"before step; dp = {layout.dp * layout.cp} without cp works"
            )
        if has_weight:
            raise ValueError(
                f"{shifts}, so weight= could not count the labels of a part; model_loss without "
                "weight= works, which finds them"
            )
    check_activations(model, layout)
    check_modules(model, parts=parts, zero=layout.zero, tp=layout.tp)
    check_loss_parameters(loss)


def _check_experts(model: nn.Module, layout: Layout) -> None:
    """Raises `ValueError` if the divided model has no experts for the axis `ep`."""
    blocks = (block_of(each) for each in model.parameters())
    if layout.ep > 1 and all(block.summed_over != "expert_tokens" for block in blocks):
        raise ValueError(
            f"ep = {layout.ep} divides experts, but {type(model).__name__} has none; ep = 1 works"
        )


def _check_grid(model: nn.Module, layout: Layout, loss: Loss) -> None:
    """Raises `ValueError` for models and losses that need 1D tensor parallelism."""
    refused = ""
    if not any(isinstance(each, SelfAttention) for each in model.modules()):
        refused = f"the modules of TransformerModel; {type(model).__name__} has none"
    elif any(isinstance(each, MixtureOfExperts) for each in model.modules()):
        refused = "dense layers; the model has experts"
    elif not isinstance(loss, CrossEntropy):
        refused = "the loss parallel.CrossEntropy(vocab)"
    if refused:
        raise ValueError(f"tensor = {layout.tensor} needs {refused}; tensor = 1d works")


def _divide_parameters(
    stages: Sequence[tuple[int, nn.Module]],
    mesh: TrainingMesh,
    names: NamedParameters,
    calls: CallOrder,
    precision: Precision,
) -> tuple[Sequence[HeldParameter], Sequence[GatheredModule]]:
    """Divides parameters as the layout's ZeRO stage says, and gives them memory. Returns the
    parameters, and the modules that gather parameters."""
    held = names.held(stages)
    modules: list[GatheredModule] = []
    if mesh.layout.zero >= 2:
        for _, stage in stages:
            modules += shard_modules(stage, mesh, calls, precision, names.held_twice(held))
    give_memory([stage for _, stage in stages])
    return names.held_again(held, stages), modules
