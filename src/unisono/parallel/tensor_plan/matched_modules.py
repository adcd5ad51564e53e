"""The modules of a model that a table of patterns and styles names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from unisono.parallel.tensor_plan.adapters import adapted_layers, with_adapters
from unisono.parallel.tensor_plan.default_styles import default_styles
from unisono.parallel.tensor_plan.styles import STYLES, Style, StyleName, style_of

Matches = dict[str, Style]
"""The style of each module, by its name in the model."""


def matched_modules(model: nn.Module, styles: Mapping[str, StyleName]) -> Matches:
    """Returns the styles of a model's modules: its own, changed by `styles`.

    Raises `ValueError` for a pattern that matches no module, and for unknown styles.
    """
    names = dict(model.named_modules())
    found = _own_matches(model, names)
    parameters = dict(model.named_parameters())
    for pattern, given in styles.items():
        style = style_of(pattern, given)
        matched = [name for name in names if name and _fits(pattern, name)]
        if not matched:
            of = [name for name in parameters if _fits(pattern, name)]
            problem = "matches a parameter" if of else "matches nothing"
            near = of[0].rpartition(".")[0] if of else next(filter(None, names), "")
            raise ValueError(
                f"styles: {pattern!r} {problem} in {type(model).__name__}; expected the end of the "
                f"name of a module, with * for a part between dots, such as {near!r}"
            )
        found.update(dict.fromkeys(matched, style))
    return _of_ties(model, with_adapters(model, found), styles)


def is_matched(name: str, patterns: Iterable[str]) -> bool:
    """Returns True if a pattern matches the name of a module."""
    return any(_fits(pattern, name) for pattern in patterns)


def _fits(pattern: str, name: str) -> bool:
    """Returns True if the last parts of a name are those of a pattern.

    >>> _fits("layers.*.mlp", "model.layers.3.mlp"), _fits("mlp", "old_mlp")
    (True, False)
    """
    wanted, parts = pattern.split("."), name.split(".")
    return len(parts) >= len(wanted) and all(
        fnmatchcase(part, want) for part, want in zip(parts[-len(wanted) :], wanted, strict=True)
    )


def _own_matches(model: nn.Module, names: Mapping[str, nn.Module]) -> Matches:
    """Returns the styles that a model states, without those that are not supported.

    Modules around and beside a module of another style stay whole, too: they may need it divided.
    """
    found: Matches = {}
    left_out: set[str] = set()
    parameters = {name for name, _ in model.named_parameters()}
    for pattern, given in default_styles(model).items():
        matched = [each for each in (*names, *parameters) if each and _fits(pattern, each)]
        for name in matched:
            if given in STYLES and name in names:
                found[name] = STYLES[given]
            elif name in names:
                has_parts = any(each.startswith(f"{name}.") for each in names)
                left_out.add(name if has_parts else name.rpartition(".")[0])
            else:
                left_out.add(name.rpartition(".")[0])
    return {
        name: style
        for name, style in found.items()
        if not any(name == each or name.startswith(f"{each}.") for each in left_out)
    }


def _of_ties(model: nn.Module, found: Matches, styles: Mapping[str, StyleName]) -> Matches:
    """Returns styles that divide both users of one weight, an embedding and the last layer.

    Changes only styles that the model states. The table is divided by rows, as the last layer is;
    if that is not possible, both stay whole.
    """
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    kept, layers = dict(found), adapted_layers(model)
    for several in (each for each in owners.values() if len(each) > 1):
        if any(is_matched(layers.get(name, name), styles) for name in several):
            continue
        modules = {name: model.get_submodule(name) for name in several}
        tables = [name for name, each in modules.items() if isinstance(each, nn.Embedding)]
        heads = [name for name in several if name not in tables]
        divides_rows = all(name in found and found[name].cut == "outputs" for name in heads)
        if divides_rows and heads and all(modules[each].max_norm is None for each in tables):
            kept.update(dict.fromkeys(tables, STYLES["embedding_rowwise"]))
        else:
            for name in several:
                kept.pop(name, None)
    return kept
