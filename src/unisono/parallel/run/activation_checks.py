"""Refusal of modules that need whole activations where the ranks divide them.

With `cp`, each module sees a part of the positions. With sequence parallelism, the modules between
`TokenEmbedding` and `LogitHead` see a part of the positions, and with tensor parallelism in 2D,
2.5D and 3D a part of the samples and features. Only modules that are known to be right may be
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from unisono.parallel.divisible.interfaces import Divisible, has_divisible
from unisono.parallel.divisible.parameter_block import sum_over_tp
from unisono.parallel.layers import (
    DecoderLayer,
    Experts,
    FeedForward,
    LogitHead,
    MixtureOfExperts,
    SelfAttention,
    TokenEmbedding,
    has_forward_of,
    is_elementwise,
    is_per_position,
)
from unisono.planner import Layout
from unisono.torch_backend import has_hooks, own_children

Step = tuple[str, nn.Module]
"""A module that a model calls, with its name in the model."""

_OWN = (FeedForward, LogitHead, MixtureOfExperts, SelfAttention, TokenEmbedding)
_OF_OWNER = (nn.Linear, Experts)  # parts of these modules, which divide them
_DECLARED, _SERVES = "is_per_position", "serves"


class _Place(NamedTuple):
    """The kind of division of activations."""

    kind: str
    """One of `ALL_ACTIVATIONS`."""
    divided: str
    """Words about what is divided, and by what."""
    cure: str
    """Words about the layout that works."""
    divides_features: bool = False


def check_activations(model: nn.Module, layout: Layout) -> None:
    """Raises `ValueError` for modules that may need whole activations where `layout` divides them,
    and for sequence parallelism of models without `TokenEmbedding` and `LogitHead`.
    """
    if layout.cp > 1 and has_divisible(model):
        divided = f"cp = {layout.cp} divides positions over the ranks"
        place = _Place("cp", divided, f"dp = {layout.dp * layout.cp} without cp works")
        for name, module in steps(model):
            _check(name, module, place)
        _check_hooks(model.named_modules(), place)
    if _divides_between_layers(layout):
        divided = "sequence_parallel divides positions over the ranks of tp"
        place = _Place("sequence_parallel", divided, "sequence_parallel = 0 works")
        if not layout.sequence_parallel:
            divided = f"tensor = {layout.tensor} divides samples and features over the ranks of tp"
            place = _Place("tensor", divided, "tensor = 1d works", divides_features=True)
        _check_between_layers(steps(model), place)
        _check_hooks(model.named_modules(), place)
    if layout.tp > 1:
        divided = "tp divides positions inside of experts"
        place = _Place("sequence_parallel", divided, "tp = 1 works")
        for name, module in model.named_modules():
            if isinstance(module, MixtureOfExperts):
                inside = ((_join(name, key), each) for key, each in module.named_modules() if key)
                _check_hooks(inside, place)


def modules_of_positions(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that declare to treat each position alone, and whose modules do so."""
    place = _Place("cp", divided="", cure="")
    found = []
    for name, module in model.named_modules():
        if _declared(module, _DECLARED):
            try:
                _check(name, module, place)
            except ValueError:
                continue
            found.append(module)
    return found


def sum_gradients_over_positions(model: nn.Module, layout: Layout) -> None:
    """Makes the ranks of `tp` sum the gradients of modules of which each rank computes some
    positions: with sequence parallelism, all modules between `TokenEmbedding` and `LogitHead`.
    """
    if not layout.sequence_parallel or not _divides_between_layers(layout):
        return
    found = steps(model)
    first, last = _ends(found)
    for _, module in found[first + 1 : last]:
        for parameter in _plain_parameters(module):
            sum_over_tp(parameter)


def last_head(module: nn.Module) -> LogitHead | None:
    """Returns the `LogitHead` whose logits are the result of the model; None if there is none, or
    if modules or hooks after it may need the logits of all words.
    """
    if has_hooks(module):
        return None
    if isinstance(module, LogitHead):
        return module
    if _is_sequence(module):
        for child in reversed(own_children(module).values()):
            if child is not None and (has_hooks(child) or not is_elementwise(child)):
                return last_head(child)
    return None


def steps(module: nn.Module, name: str = "") -> list[Step]:
    """Returns the modules that a module calls one after the other, each with its name.

    They are those of nested sequences. A module that is no sequence calls itself.
    """
    if not _is_sequence(module):
        return [(name, module)]
    children = own_children(module).items()  # `named_children` leaves out repeated modules
    return [each for key, child in children if child for each in steps(child, _join(name, key))]


def _divides_between_layers(layout: Layout) -> bool:
    return layout.tp > 1 and (layout.sequence_parallel or layout.tensor != "1d")


def _ends(found: Sequence[Step]) -> tuple[int, int]:
    """Returns the places of the embedding and of the head; (-1, -1) if the steps lack one."""
    first = [place for place, (_, each) in enumerate(found) if isinstance(each, TokenEmbedding)]
    last = [place for place, (_, each) in enumerate(found) if isinstance(each, LogitHead)]
    if len(first) == len(last) == 1 and first < last:
        return first[0], last[0]
    return -1, -1


def _check_between_layers(found: Sequence[Step], place: _Place) -> None:
    first, last = _ends(found)
    if last < 0:
        raise ValueError(
            f"{place.divided} between one TokenEmbedding and one LogitHead of parallel.layers; "
            "expected an nn.Sequential of the embedding, layers and the head, such as "
            f"TransformerModel; {place.cure}"
        )
    for name, module in found[first : last + 1]:
        _check(name, module, place)
    for name, module in [*found[:first], *found[last + 1 :]]:
        if not is_elementwise(module):
            raise ValueError(
                f"{name}: {place.divided} between TokenEmbedding and LogitHead; expected only "
                f"elementwise modules before and after them, got {type(module).__name__}; "
                f"{place.cure}"
            )


def _check(name: str, module: nn.Module, place: _Place) -> None:
    """Raises `ValueError` if a module, or one that it calls, may need whole activations."""
    if isinstance(module, Divisible):
        if place.kind not in (_declared(module, _SERVES) or ()):
            _refuse(name, module, place)
        children = _own_children(module)
    elif _is_sequence(module) or has_forward_of(module, (nn.Module, DecoderLayer)):
        children = module.named_children()
    elif is_elementwise(module) or (is_per_position(module) and not place.divides_features):
        return
    elif _declared(module, _DECLARED) and not place.divides_features:
        children = module.named_children()
    else:
        _refuse(name, module, place)
    for key, child in children:
        _check(_join(name, key), child, place)


def _check_hooks(modules: Iterable[Step], place: _Place) -> None:
    """Raises `ValueError` for hooks, which would see a part of activations."""
    for name, module in modules:
        if has_hooks(module):
            raise ValueError(
                f"{name or 'the model'}: has a hook, which would see a part of the activations: "
                f"{place.divided}; expected no hooks; {place.cure}"
            )


def _own_children(module: nn.Module) -> Iterator[Step]:
    """Yields the modules inside a divisible module that it does not divide itself.

    A program's module with `divide(mesh)` divides everything inside.
    """
    if isinstance(module, _OWN):
        for name, child in module.named_children():
            if not isinstance(child, _OF_OWNER):
                yield name, child


def _declared(module: nn.Module, attribute: str) -> Any:
    """Returns an attribute of a module's class; None if it has none, or if a subclass in between
    has replaced the forward that the attribute describes.
    """
    if "forward" in vars(module):
        return None
    if vars(module).get(attribute):
        return vars(module)[attribute]
    for kind in type(module).__mro__:
        if attribute in vars(kind):
            return vars(kind)[attribute]
        if "forward" in vars(kind):
            return None
    return None


def _refuse(name: str, module: nn.Module, place: _Place) -> None:
    kinds = "elementwise modules of torch"
    if not place.divides_features:
        kinds = (
            "modules of torch that treat each position alone, a class with "
            f"{_DECLARED} = True whose forward does so"
        )
    raise ValueError(
        f"{name or 'the model'}: {type(module).__name__} may need whole activations, but "
        f"{place.divided}; expected modules of parallel.layers, {kinds}, or a class with a method "
        f"divide(mesh), its forward and serves = ({place.kind!r},); {place.cure}"
    )


def _plain_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of a module, except those inside divisible modules."""
    if not isinstance(module, Divisible):
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _plain_parameters(child)


def _is_sequence(module: nn.Module) -> bool:
    return has_forward_of(module, (nn.Sequential,))


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
