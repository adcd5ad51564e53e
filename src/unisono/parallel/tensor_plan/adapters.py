"""Low-rank adapters (LoRA of peft) of layers that the ranks of `tp` divide.

An adapted layer adds B (A x) to the result of the layer inside. If the ranks divide the outputs of
this layer, they divide those of B, and A stays whole. If they divide its inputs, they divide those
of A, sum its few results, and B stays whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from unisono.parallel.tensor_plan.styles import Style

_INNER = "base_layer"
_WRAPPED = ("original_module", "modules_to_save")


def is_adapted(module: nn.Module) -> bool:
    """Returns True for a layer with low-rank adapters: linear layers by the adapters' names."""
    adapters = (getattr(module, name, None) for name in ("lora_A", "lora_B"))
    has_inner = isinstance(getattr(module, _INNER, None), nn.Module)
    return has_inner and all(isinstance(each, nn.ModuleDict) for each in adapters)


def inner_layer(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Returns the layer inside an adapted layer, with its name; another module as it is."""
    if not is_adapted(module):
        return name, module
    return f"{name}.{_INNER}", module.get_submodule(_INNER)


def adapted_layers(model: nn.Module) -> dict[str, str]:
    """Returns the name of the adapted layer of each module inside of one, by name."""
    return {
        f"{name}.{inside}": name
        for name, module in model.named_modules()
        if is_adapted(module)
        for inside, _ in module.named_modules()
        if inside
    }


def with_adapters(model: nn.Module, matches: Mapping[str, Style]) -> dict[str, Style]:
    """Returns the styles of modules, with those of the parts of adapted layers in their place.

    A module that peft trains beside its original (`modules_to_save`) has the style of the original.
    """
    found: dict[str, Style] = {}
    for name, style in matches.items():
        module = model.get_submodule(name)
        if is_adapted(module):
            found.update(_of_parts(name, module, style))
        elif all(isinstance(getattr(module, each, None), nn.Module) for each in _WRAPPED):
            copies = module.get_submodule(_WRAPPED[1]).named_children()
            names = [_WRAPPED[0], *(f"{_WRAPPED[1]}.{key}" for key, _ in copies)]
            found.update({f"{name}.{each}": style for each in names})
        else:
            found[name] = style
    return found


def require_plain(name: str, layer: nn.Module, style: Style) -> None:
    """Raises `ValueError` for a layer whose adapters use more than two matrices, if a style divides
    it."""
    if style.cut != "nothing" and getattr(layer, "lora_variant", None):
        raise ValueError(
            f"{name}: style {style.name!r} divides a layer with plain LoRA adapters, but these use "
            "the whole weight, as DoRA does; expected use_dora=False, or style 'replicate'"
        )


def _of_parts(name: str, module: nn.Module, style: Style) -> dict[str, Style]:
    if style.cut in ("rows", "vectors"):
        return {}  # an adapted table stays whole
    divided = {"outputs": "lora_B", "inputs": "lora_A"}.get(style.cut)
    found = {f"{name}.{_INNER}": style}
    for key, _ in module.get_submodule(divided).named_children() if divided else ():
        found[f"{name}.{divided}.{key}"] = style
    return found
