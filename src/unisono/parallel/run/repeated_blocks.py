"""The repeated blocks of a model, and the modules around them, as a pipeline can cut them.

Most models repeat a block: `model.layers` of a Llama, for example. A forward pass of the model on
an example shows which modules run before the first block and after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from unisono.parallel.run.hollow_module import hollow
from unisono.parallel.run.model_stages import cost_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedBlocks:
    """The names of a model's blocks and of the modules around them."""

    blocks: tuple[str, ...]
    before: frozenset[str]
    """Modules that run before the first block, or not at all."""
    after: frozenset[str]
    """Modules that run after the last block."""
    costs: tuple[float, ...]
    """Of each block, and with the last one of the modules after it: the elements of matrices."""
    hollows: dict[str, nn.Module]
    """All these modules without their weights, as they were before the division."""

    @classmethod
    def of(cls, model: nn.Module, run: Callable[[nn.Module], Any]) -> RepeatedBlocks:
        """Finds the blocks of a model. `run` calls the model with an example.

        Raises `ValueError`, with the reason, if it has no blocks or calls them in another way.
        """
        container = _largest_container(model)
        blocks = [
            f"{container}.{name}" for name, _ in model.get_submodule(container).named_children()
        ]
        around = _around(model, blocks)
        order = _order_of_calls(model, [*blocks, *around], run)
        called = [name for name in order if name in set(blocks)]
        if called != blocks:
            raise ValueError(
                f"calls the blocks of {container} in another order than theirs, or several times"
            )
        first, last = order.index(blocks[0]), order.index(blocks[-1])
        between = {name for name in order[first:last] if name in around}
        if between:
            raise ValueError(f"calls {min(between)} between blocks of {container}")
        after = set(order[last:]) & around
        costs = [cost_of(model.get_submodule(name)) for name in blocks]
        costs[-1] += sum(cost_of(model.get_submodule(name)) for name in after)
        return cls(
            blocks=tuple(blocks),
            before=frozenset(set(order[:first]) & around | (around - after)),
            after=frozenset(after),
            costs=tuple(costs),
            hollows={name: hollow(model.get_submodule(name)) for name in (*blocks, *around)},
        )


def parents_of(names: Sequence[str]) -> set[str]:
    """Returns the names of all modules that contain one of these, also the model's own, ''.

    >>> sorted(parents_of(["model.layers.0"]))
    ['', 'model', 'model.layers']
    """
    found = {""}
    for name in names:
        parts = name.split(".")
        found |= {".".join(parts[:end]) for end in range(1, len(parts))}
    return found


def _largest_container(model: nn.Module) -> str:
    """Returns the name of the list of modules of one type that has most parameters."""
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        types = {type(each) for each in module.children()}
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len(types) == 1:
            sizes[name] = sum(each.numel() for each in module.parameters())
    if not any(sizes.values()):
        raise ValueError("has no nn.ModuleList of blocks of one type")
    return max(sizes, key=lambda name: sizes[name])


def _around(model: nn.Module, blocks: Sequence[str]) -> set[str]:
    """Returns the names of the largest modules that contain no block."""
    parents = parents_of(blocks)
    found = set()
    for parent in parents:
        for name, _ in model.get_submodule(parent).named_children():
            path = f"{parent}.{name}" if parent else name
            if path not in parents and path not in blocks:
                found.add(path)
    for path, module in model.named_modules():
        if "forward" in vars(module):  # a copy would call the module itself
            raise ValueError(f"has a forward of the instance {path or 'of the model'}")
    return found


def _order_of_calls(
    model: nn.Module, names: Sequence[str], run: Callable[[nn.Module], Any]
) -> list[str]:
    """Returns the names of modules in the order of the calls of their parts."""
    order: list[str] = []
    handles = []
    for name in names:
        module = model.get_submodule(name)
        has_forward = type(module).forward is not nn.Module.forward

        def note(*_: Any, name: str = name) -> None:
            order.append(name)

        handles += [
            each.register_forward_pre_hook(note)
            for each in ([module] if has_forward else module.modules())
        ]
    try:
        run(model)
    finally:
        for each in handles:
            each.remove()
    return order
