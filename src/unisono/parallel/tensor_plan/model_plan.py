"""A plan of tensor and expert parallelism, to be read and changed before a model is divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import nn

from unisono.parallel.divisible.interfaces import has_divisible
from unisono.parallel.expert_stacks import DividedExperts, ExpertStack, find_stacks
from unisono.parallel.layers import SelfAttention
from unisono.parallel.precision import Precision, required_precision
from unisono.parallel.tensor_plan.adapters import adapted_layers, require_plain
from unisono.parallel.tensor_plan.attention_heads import attention_of
from unisono.parallel.tensor_plan.divided_module import SharedInput, divide_module
from unisono.parallel.tensor_plan.matched_modules import Matches, is_matched, matched_modules
from unisono.parallel.tensor_plan.module_cuts import PlannedModule, cuts_of, require_kind
from unisono.parallel.tensor_plan.plan_checks import check_plan
from unisono.parallel.tensor_plan.plan_table import plan_table
from unisono.parallel.tensor_plan.styles import STYLES, StyleName
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import Layout

_BETWEEN = "replicated_with_grad_allreduce"


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """A division of a model over the ranks of `tp` and `ep`. `str(plan)` is a table.

    Modules that the plan does not name stay whole, or divide themselves (`divide(mesh)`, pairs of
    `nn.Linear` in an `nn.Sequential`).
    """

    model: nn.Module = field(repr=False)
    layout: Layout
    styles: Mapping[str, StyleName]
    """The styles that were given, by pattern."""
    modules: tuple[PlannedModule, ...]
    """The modules with a style, in the order of the model."""
    experts: tuple[ExpertStack, ...] = ()
    """The modules whose experts the ranks of `ep` divide."""
    precision: Precision | None = None
    """The types in which a run of the plan keeps weights and computes; None: none was given."""

    def replace(self, styles: Mapping[str, StyleName]) -> ModelPlan:
        """Returns a plan with other styles for the modules that these patterns match.

        Raises `ValueError` as `plan` does.
        """
        styles = {**self.styles, **styles}
        return plan(self.model, self.layout, styles=styles, precision=self.precision)

    def __str__(self) -> str:
        types = required_precision(self.precision)
        return plan_table(self.model, self.layout, self.modules, self.experts, types)

    @property
    def is_divided(self) -> bool:
        """True if the plan divides a module over the ranks of `tp`."""
        return any(each.cuts for each in self.modules)

    @property
    def head_copies(self) -> int:
        """The number of ranks that keep the same heads of keys and values; 1 without copies."""
        own = (each for each in self.model.modules() if isinstance(each, SelfAttention))
        found = [each.head_copies(self.layout) for each in own]
        return max(
            [1, *found, *(cut.copies for each in self.modules for cut in each.cuts.values())]
        )

    def divide(self, mesh: TrainingMesh) -> None:
        """Keeps this rank's parts of the modules. The plan must fit the mesh's layout."""
        for stack in self.experts:
            DividedExperts(stack, mesh)
        if mesh.group("tp") is None:
            return
        members: dict[str, list[PlannedModule]] = {}
        for each in self.modules:
            members.setdefault(each.around if each.shares_input else each.name, []).append(each)
        for siblings in members.values():
            shared = SharedInput(sum(each.style.cut == "outputs" for each in siblings))
            for each in siblings:
                divide_module(each, mesh, shared)


def plan(
    model: nn.Module,
    layout: Layout,
    *,
    styles: Mapping[str, StyleName] | None = None,
    precision: Precision | None = None,
) -> ModelPlan:
    """Returns what the ranks of `tp` and `ep` divide of a model. Changes nothing; needs no ranks.

    Models of transformers state the styles of their modules; a few other classes are known.
    `styles` adds to these and changes them: a mapping from patterns to styles. A pattern is the end
    of a module's name, with `*` for a part between dots. The styles:

    - `colwise`: a linear layer keeps a part of its outputs; in attention, whole heads. If there
      are fewer heads of keys and values than ranks, several ranks keep the same.
    - `rowwise`: a linear layer keeps its columns for these inputs; the ranks sum the results.
    - `colwise_gather_output` (`colwise_rep`), `rowwise_split_input` (`rowwise_rep`): the same with
      outputs of all ranks, and for inputs that are whole.
    - `packed_colwise`: two fused layers, such as gate and up; `qkv_colwise`: fused queries, keys
      and values.
    - `embedding_rowwise`, `embedding_colwise`: a table is divided by rows or by columns.
    - `replicate`: the module stays whole. `replicated_with_grad_allreduce`: it stays whole and sees
      divided activations, such as a norm of each head.

    `ColwiseParallel()` and `RowwiseParallel()` of torch are `colwise` and `rowwise`.

    `ep` divides the experts of modules with parameters (experts, ..., ...) that are called with
    rows, and the numbers and weights of the experts of each row, as in models of transformers;
    `replicate` keeps them whole.

    `precision`: that of the run, whose type of weights the table counts.

    Raises `ValueError` for a pattern that matches no module, an unknown style, and modules that the
    ranks cannot divide.

        plan = parallel.plan(model, Layout(tp=2), styles={"layers.*.mlp.fc1": "colwise"})
        print(plan)
        run = parallel.parallelize(plan, loss=loss_fn, optimizer=adam)
    """
    required_precision(precision)
    given = MappingProxyType(dict(styles or {}))
    matches = matched_modules(model, given)
    if layout.tp == 1:
        modules: tuple[PlannedModule, ...] = ()
    else:
        modules = _planned(model, matches, layout)
    check_plan(model, layout, modules, given)
    kept = [
        name
        for name, style in matches.items()
        if style.cut == "nothing" and is_matched(name, given)
    ]
    return ModelPlan(
        model=model,
        layout=layout,
        styles=given,
        modules=modules,
        experts=_experts(model, layout, kept) if layout.ep > 1 else (),
        precision=precision,
    )


def _experts(model: nn.Module, layout: Layout, kept: list[str]) -> tuple[ExpertStack, ...]:
    """Returns the experts that the ranks of `ep` divide. `kept`: modules that stay whole."""
    found = find_stacks(model, kept)
    if found.stacks or not has_divisible(model):
        found.require(model, layout)
    return found.stacks


def _planned(model: nn.Module, matches: Matches, layout: Layout) -> tuple[PlannedModule, ...]:
    layers = adapted_layers(model)
    for name, style in matches.items():
        require_kind(name, model.get_submodule(name), style)
        layer = layers.get(name, name)
        require_plain(layer, model.get_submodule(layer), style)
    attentions = {
        parent: attention
        for parent in dict.fromkeys(_parent(layers.get(name, name)) for name in matches)
        if (attention := attention_of(model, parent, matches, layout.tp)) is not None
    }
    between = {name: STYLES[_BETWEEN] for each in attentions.values() for name in each.norms}
    found = []
    for name, module in model.named_modules():
        own = attentions.get(name)
        if name not in matches and name not in between and not (own and own.local_values):
            continue
        style = matches.get(name) or between.get(name) or STYLES["replicate"]
        layer = layers.get(name, name)
        around = attentions.get(_parent(layer)) if name else None
        heads = None if around is None else around.heads
        found.append(
            PlannedModule(
                name=name,
                layer=layer,
                module=module,
                style=style,
                cuts=cuts_of(name, module, style, heads, layout.tp),
                local_values={} if own is None else own.local_values,
            )
        )
    return tuple(found)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
