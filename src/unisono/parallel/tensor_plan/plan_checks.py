"""Refusal of plans whose modules do not fit each other, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from unisono.parallel.divisible.interfaces import Divisible
from unisono.parallel.tensor_plan.attention_heads import AttentionHeads
from unisono.parallel.tensor_plan.linear_sizes import inputs_of, outputs_of
from unisono.parallel.tensor_plan.matched_modules import is_matched
from unisono.parallel.tensor_plan.module_cuts import ParameterCut, PlannedModule
from unisono.parallel.tensor_plan.styles import StyleName
from unisono.planner import Layout

_ATTENTION = 3


def check_plan(
    model: nn.Module,
    layout: Layout,
    modules: Sequence[PlannedModule],
    styles: Mapping[str, StyleName],
) -> None:
    """Raises `ValueError` for a plan that no run can follow. `styles`: those that a program gave,
    which are checked more than those of the model."""
    if not any(each.cuts for each in modules):
        return
    _check_layout(layout)
    _check_owners(model, modules)
    _check_heads(model, modules, styles)
    _check_pairs(modules, styles)
    _check_ties(model, modules)
    copies = {cut.copies for each in modules for cut in each.cuts.values()} - {1}
    if len(copies) > 1:
        raise ValueError(
            f"styles: tp = {layout.tp} gives {' and '.join(map(str, sorted(copies)))} ranks the "
            "same heads of keys in different modules; a tp that divides the heads of all modules "
            "works"
        )


def _check_layout(layout: Layout) -> None:
    if layout.tensor != "1d" or layout.sequence_parallel:
        kind = "sequence_parallel" if layout.sequence_parallel else f"tensor = {layout.tensor}"
        raise ValueError(
            f"{kind} divides the modules of TransformerModel, not modules by their styles; "
            "tensor = 1d without sequence_parallel works"
        )


def _check_owners(model: nn.Module, modules: Sequence[PlannedModule]) -> None:
    """Raises `ValueError` for modules inside modules that divide themselves."""
    owners = {
        id(part): (name, type(each).__name__)
        for name, each in model.named_modules()
        for part in each.modules()
        if isinstance(each, Divisible)
    }
    for each in modules:
        if each.cuts and id(each.module) in owners:
            name, kind = owners[id(each.module)]
            raise ValueError(
                f"{each.name}: style {each.style.name!r} divides a part of {name} ({kind}), which "
                "divides itself; expected no style for it"
            )


def _check_heads(
    model: nn.Module, modules: Sequence[PlannedModule], styles: Mapping[str, StyleName]
) -> None:
    """Raises `ValueError` for modules with three layers that divide outputs, as attention has,
    whose heads are not known."""
    outputs: dict[str, dict[str, int]] = {}
    for each in modules:
        if each.cuts and each.style.divides_outputs and _is_given(each, styles):
            outputs.setdefault(each.around, {})[each.layer] = outputs_of(each.module)
    for around, of_layers in outputs.items():
        module, widths = model.get_submodule(around), list(of_layers.values())
        if len(widths) >= _ATTENTION and AttentionHeads.of(module, widths, []) is None:
            raise ValueError(
                f"{around or 'the model'}: {len(widths)} layers of a {type(module).__name__} divide"
                " their outputs, as those of attention, but its heads are not known; expected an "
                "attribute head_dim or num_heads, or style 'replicate'"
            )


def _check_pairs(modules: Sequence[PlannedModule], styles: Mapping[str, StyleName]) -> None:
    """Raises `ValueError` if a module divides outputs that no module sums, or the reverse.

    A module with the style `rowwise` sums over the modules that divide outputs in the smallest
    module around it that has such modules, without those that inner modules sum.
    """
    left = [each for each in modules if each.cuts and each.style.divides_outputs]
    waiting = [each for each in modules if each.cuts and each.style.sums_inputs]
    depth = max((each.name.count(".") for each in waiting), default=0)
    while waiting and depth >= 0:
        summed: set[str] = set()
        for each in list(waiting):
            around = each.name.split(".")[:-1]
            found = [other for other in left if other.name.split(".")[:depth] == around[:depth]]
            if found and len(around) >= depth:
                summed.update(other.name for other in found)
                waiting.remove(each)
                _check_widths(each, [other for other in found if _is_given(other, styles)])
        left = [each for each in left if each.name not in summed]
        depth -= 1
    if left:
        raise ValueError(
            f"{left[0].name}: style {left[0].style.name!r} divides the outputs, but no module after"
            " it has the style 'rowwise', which sums over them; colwise_gather_output and "
            "'replicate' work"
        )
    if waiting:
        raise ValueError(
            f"{waiting[0].name}: style 'rowwise' expects divided inputs, but no module before it "
            "has a style such as 'colwise' that divides outputs; rowwise_split_input and "
            "'replicate' work"
        )


def _is_given(planned: PlannedModule, styles: Mapping[str, StyleName]) -> bool:
    return is_matched(planned.name, styles) or is_matched(planned.layer, styles)


def _check_widths(last: PlannedModule, firsts: Sequence[PlannedModule]) -> None:
    """Raises `ValueError` for modules with more outputs than the module that sums has inputs.

    They are fused layers, of which a contiguous part is not a part of each.
    """
    inputs = inputs_of(last.module)
    for each in firsts:
        outputs = outputs_of(each.module) // each.style.parts
        if outputs > inputs and not each.style.is_fused_attention:
            raise ValueError(
                f"{each.name}: style {each.style.name!r} divides {outputs} outputs, but {last.name}"
                f" sums over {inputs} inputs, so the layer may be fused; expected 'packed_colwise' "
                "for two fused layers, 'qkv_colwise' for queries, keys and values, or "
                "'colwise_gather_output'; a model states another order in its _tp_plan"
            )


def _check_ties(model: nn.Module, modules: Sequence[PlannedModule]) -> None:
    """Raises `ValueError` for a parameter that two modules share and do not divide alike."""
    cuts: dict[str, ParameterCut] = {
        f"{each.name}.{key}": cut for each in modules for key, cut in each.cuts.items()
    }
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for first, *others in names.values():
        for name in others:
            if cuts.get(first) != cuts.get(name):
                raise ValueError(
                    f"{first} and {name} are one parameter, but their styles divide only one of "
                    "them, or each differently; expected 'embedding_rowwise' for the embedding and "
                    "'colwise_gather_output' for the linear layer, or 'replicate' for both"
                )
