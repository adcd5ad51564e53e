"""The division of a model by a plan, which all ranks follow."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from unisono.parallel.divisible.interfaces import Divisible, attached
from unisono.parallel.divisible.parameter_block import block_of
from unisono.parallel.expert_stacks import DividedExperts
from unisono.parallel.layers import CrossEntropy, LogitHead, pair_linears, undivided_linear
from unisono.parallel.precision import Precision
from unisono.parallel.run.activation_checks import last_head, sum_gradients_over_positions
from unisono.parallel.run.loss.batch_loss import Loss
from unisono.parallel.run.model_checks import check_parameters
from unisono.parallel.run.rank_agreement import of_all_ranks, on_all_ranks
from unisono.parallel.tensor_plan import ModelPlan, StyleName, plan
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import Layout
from unisono.torch_backend import has_hooks


def plan_of_all_ranks(
    model: nn.Module | ModelPlan, layout: Layout | None, styles: Mapping[str, StyleName] | None
) -> ModelPlan:
    """Returns a given plan, or the plan of a model and a layout. Collective.

    Raises `ValueError` on all ranks for a plan that a run cannot follow, and for ranks with
    different plans.
    """
    found = on_all_ranks(lambda: _plan(model, layout, styles))
    first, *others = of_all_ranks(str(found))
    for rank, text in enumerate(others, 1):
        if text != first:
            pairs = zip(first.splitlines(), text.splitlines(), strict=False)
            ours, theirs = next((a, b) for a, b in pairs if a != b)
            raise ValueError(
                f"parallelize: expected equal plans on all ranks, got {' '.join(ours.split())!r} on"
                f" rank 0 and {' '.join(theirs.split())!r} on rank {rank}"
            )
    return found


def planned_precision(
    model: nn.Module | ModelPlan, precision: Precision | None
) -> Precision | None:
    """Returns the precision of a run: the one that is given, or that of the plan.

    Raises `ValueError` if both are given and differ.
    """
    planned = model.precision if isinstance(model, ModelPlan) else None
    if planned is not None and precision is not None and planned != precision:
        raise ValueError(
            f"precision: expected that of the plan, {planned}, or none, got {precision}; "
            "plan(model, layout, precision=...) makes another plan"
        )
    return planned if precision is None else precision


def _plan(
    model: nn.Module | ModelPlan, layout: Layout | None, styles: Mapping[str, StyleName] | None
) -> ModelPlan:
    check_parameters(model.model if isinstance(model, ModelPlan) else model)
    if isinstance(model, ModelPlan):
        if layout is not None or styles is not None:
            raise ValueError(
                "parallelize: expected a plan alone, got a plan with a layout or styles; "
                "plan.replace(styles) changes a plan"
            )
        found = model.replace({})  # the model may have changed
    elif layout is None:
        raise ValueError("parallelize: expected a layout, got none; Layout() is one process")
    else:
        found = plan(model, layout, styles=styles)
    return found


def divide_model(planned: ModelPlan, loss: Loss, mesh: TrainingMesh) -> None:
    """Keeps this rank's part of a model: by its plan, by `divide(mesh)`, and by pairs of linear
    layers. Raises `ValueError` for a model without such modules."""
    model = planned.model
    head = last_head(model)
    planned.divide(mesh)
    for module in list(model.modules()):
        if isinstance(module, LogitHead):
            module.keeps_parts = module is head and isinstance(loss, CrossEntropy)
        if isinstance(module, Divisible):
            module.divide(mesh)
    _check_hooks(planned, mesh.layout)  # before pairs get hooks of their own
    sum_gradients_over_positions(model, mesh.layout)
    pairs = pair_linears(model, mesh)
    if head is not None and isinstance(loss, CrossEntropy):
        loss.divide(mesh)
    if (
        mesh.layout.tp > 1
        and not pairs
        and not planned.is_divided
        and not any(isinstance(each, Divisible) for each in model.modules())
    ):
        raise ValueError(
            f"tp = {mesh.layout.tp}: found nothing to divide in {type(model).__name__}"
            f"{undivided_linear(model)}; expected modules with a method divide(mesh), an "
            "nn.Sequential with two nn.Linear around elementwise modules, or styles={...} for its "
            f"modules; dp = {mesh.layout.dp * mesh.layout.tp} without tp works"
        )


def _check_hooks(planned: ModelPlan, layout: Layout) -> None:
    """Raises `ValueError` for hooks of modules that compute a part of their result.

    Stacked experts return the results of all rows that they get, and some styles are whole outside.
    """
    whole = {each.module for each in attached(planned.model, DividedExperts)}
    whole |= {each.module for each in planned.modules if each.style.is_whole_outside}
    for name, module in planned.model.named_modules():
        blocks = [(each, block_of(each)) for each in module.parameters(recurse=False)]
        is_cut = any(tuple(each.shape) != block.shape for each, block in blocks)
        if is_cut and module not in whole and has_hooks(module):
            raise ValueError(
                f"{name}: has a hook, which would see one rank's part of the result in "
                f"{layout.text()}; hooks of the modules around it and dp = {layout.devices} work"
            )
