"""The modules of a stage whose parameters `fully_shard` gathers separately: its repeated blocks.

A unit gathers its parameters when it is called, so the memory of gathered weights is that of one
block, and of the modules around it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from torch import nn

_LEAST_BYTES = 4096
"""A smaller block is gathered with its parent: the call of a gather costs more than its memory."""


def gathered_units(stage: nn.Module) -> list[nn.Module]:
    """Returns the modules that gather their parameters separately, inner modules first.

    These are the children of the stage, and the blocks inside each child: modules of one type that
    a container such as `nn.ModuleList` repeats, at any depth. A child with blocks gathers its other
    parameters itself. Parameters that no unit has, or that modules outside of a unit use too,
    belong to the stage. Modules inside a block are no units, because a block may call them or not
    (experts, for example).

    >>> stack = nn.Module()
    >>> stack.embedding = nn.Embedding(50, 32)
    >>> stack.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    >>> stage = nn.ModuleDict({"stack": stack, "head": nn.Linear(32, 50)})
    >>> stack.forward = stage.forward = lambda x: x  # models define it in their class
    >>> [name for name, each in stage.named_modules() if each in gathered_units(stage)]
    ['stack', 'stack.layers.0', 'stack.layers.1', 'stack.layers.2', 'head']
    """
    repeated = _repeated(stage)
    found: dict[nn.Module, None] = {}
    for child, _ in _called_children(stage):
        found.update(dict.fromkeys([] if child in repeated else _blocks(child)))
        found[child] = None
    owners: defaultdict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for module in stage.modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter].add(module)
    experts, uses = _experts(stage), _uses(stage)
    return [each for each in found if each not in experts and _is_alone(each, owners, uses)]


def kept_units(units: list[nn.Module]) -> set[nn.Module]:
    """Returns the units that keep their gathered parameters between forward and backward.

    These are the last unit, whose backward pass comes first, and the last unit around blocks, with
    those around it: each is gathered while its blocks run in both directions. `units`: those of
    `gathered_units`.

    >>> blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    >>> stack = nn.ModuleDict({"embedding": nn.Embedding(50, 32), "blocks": blocks})
    >>> head = nn.Linear(32, 50)
    >>> kept_units([*blocks, stack, head]) == {stack, head}
    True
    """
    inside = {each: set(each.modules()) - {each} for each in units}
    around = [each for each in units if not inside[each].isdisjoint(units)]
    last = around[-1:]
    return {*units[-1:], *last, *(each for each in around if last[0] in inside[each])}


def _uses(module: nn.Module) -> Counter[nn.Module]:
    """Returns the number of places in a module where each module inside is."""
    return Counter(each for _, each in module.named_modules(remove_duplicate=False))


def _is_alone(
    unit: nn.Module, owners: dict[nn.Parameter, set[nn.Module]], uses: Counter[nn.Module]
) -> bool:
    """Returns True if no module outside of the unit has one of its parameters, and none of its
    modules is in another place of the stage. `uses`: the places in the stage."""
    inside = _uses(unit)
    return all(owners[each] <= inside.keys() for each in unit.parameters()) and all(
        uses[each] == count * uses[unit] or not any(True for _ in each.parameters())
        for each, count in inside.items()
    )


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the repeated blocks inside a module, and the modules around them, inner ones first.

    A module without blocks has none around them.
    """
    repeated, experts = _repeated(module), _experts(module)
    found: list[nn.Module] = []
    for child, _ in _called_children(module):
        if child in experts:
            continue
        inner = [] if child in repeated else _blocks(child)
        found += [*inner, child] if inner or child in repeated else []
    return found


def _repeated(module: nn.Module) -> set[nn.Module]:
    """Returns the called children of a module whose type several of them have.

    A child without children of its own, such as a linear layer, counts only in a container. An
    `nn.Sequential` is such a container, and does not count itself.
    """
    children = {
        child: is_contained or any(True for _ in child.children())
        for child, is_contained in _called_children(module)
        if not _is_sequence(child) and sum(p.nbytes for p in child.parameters()) >= _LEAST_BYTES
    }
    types = Counter(type(child) for child, is_block in children.items() if is_block)
    return {child for child, is_block in children.items() if is_block and types[type(child)] > 1}


def _experts(module: nn.Module) -> set[nn.Module]:
    """Returns the children that a router chooses: the module has a matrix with a row for each.

    Ranks may call different ones.
    """
    found: set[nn.Module] = set()
    for container in module.children():
        members = set(container.children())
        if _is_called(container) or len(members) < 2:
            continue
        inside = {each for child in members for each in child.parameters()}
        others = [each for each in module.parameters() if each not in inside]
        if any(each.dim() == 2 and len(members) in each.shape for each in others):
            found |= members
    return found


def _called_children(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yields the children of a module, and whether a container holds the child.

    A container without `forward`, such as `nn.ModuleList`, counts as its own children: torch
    gathers weights when `forward` is called.
    """
    is_container = _is_sequence(module) or not _is_called(module)
    for child in module.children():
        if _is_called(child):
            yield child, is_container
        else:
            yield from _called_children(child)


def _is_called(module: nn.Module) -> bool:
    """Returns True for a module with `forward`."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _is_sequence(module: nn.Module) -> bool:
    return type(module).forward is nn.Sequential.forward
