"""Pipeline stages of a model that repeats a block, as `model.layers` of a Llama does.

A forward pass of the model on an example shows which modules run before the first block and after
the last one. Every stage runs the model's own forward pass with the whole batch. The blocks before
its own return what the stage before has sent, and the first block after its own ends the pass.
Modules that run before all blocks have no weights in later stages: only the shapes of their results
count there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from unisono.parallel.run.batch.batch_tree import Frame, copied
from unisono.parallel.run.pipeline.model_stages import PipelineStage, cost_of, cut_stages
from unisono.torch_backend import empty_tensors, forget_hooks, own_children, share_parts, shell


def hollow(module: nn.Module) -> nn.Module:
    """Returns a copy of a module whose parameters are NaN and need no memory.

    Its results are NaN where they depend on a parameter. The copy has no hooks, and neither
    parameters nor buffers for `named_parameters` and `named_buffers`.

    >>> import torch
    >>> x = hollow(nn.Linear(2, 3))(torch.ones(4, 2))
    >>> x.shape, bool(x.isnan().all())
    (torch.Size([4, 3]), True)
    """
    found: nn.Module = shell(module)
    children = own_children(found)
    for name, each in children.items():
        children[name] = None if each is None else hollow(each)
    empty_tensors(found)
    forget_hooks(found)
    return found


if TYPE_CHECKING:
    from unisono.parallel.run.batch.model_call import ModelCall


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


class _Reached(Exception):
    """The pass has reached the first block after those of a stage."""


class _Ended(BaseException):
    """A stage that is not the last has returned its result to a function that calls the model."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


class BlockStage(PipelineStage):
    """Some blocks of a model, and the modules before or after all blocks, under their names."""

    def __init__(self, model: nn.Module, found: RepeatedBlocks, first: int, end: int) -> None:
        """Blocks from `first` up to `end`."""
        super().__init__()
        self._is_first, self._is_last = first == 0, end == len(found.blocks)
        own = set(found.blocks[first:end])
        own |= found.before if self._is_first else set()
        own |= found.after if self._is_last else set()
        self._left: list[Any] = []
        root = self._assembled(model, "", own, found, parents_of(found.blocks))
        for name in found.blocks[:first]:
            vars(root.get_submodule(name))["forward"] = self._skip
        if not self._is_last:
            vars(root.get_submodule(found.blocks[end]))["forward"] = self._stop
        share_parts(self, root)
        self._end = [model.get_submodule(found.blocks[end - 1])]  # in lists: no children
        self._root = [root]

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Returns the result of the last block, or the model's output if this stage is the last."""
        self._left.clear()
        if self._is_last:
            return self._root[0](*arguments, **keywords)
        # registered last, so that it sees what other hooks return
        handle = self._end[0].register_forward_hook(lambda *found: self._left.append(found[-1]))
        try:
            self._root[0](*arguments, **keywords)
        except _Reached:
            return self._left.pop()
        finally:
            handle.remove()
        raise ValueError("expected the model to call all blocks, but it has returned before")

    def called_by(self, function: Callable[[Any, Any], Any], batch: Any) -> Any:
        """Returns what a function computes of the model and a batch.

        The function gets an object with the attributes of the model. What it does after the call of
        the model is left to the last stage.
        """
        try:
            return function(_CalledModel(self._root[0], self, is_last=self._is_last), batch)
        except _Ended as ended:
            return ended.result

    def resume(self, call: ModelCall, arrived: Any, batch: Any) -> Any:
        with self.resuming(arrived):
            return call(self, copied(batch))

    @contextmanager
    def resuming(self, arrived: Any) -> Iterator[None]:
        """Returns a context for a call that goes on with the result of the stage before."""
        self.arrived = arrived
        try:
            yield
        finally:
            self.arrived = None

    def train(self, mode: bool = True) -> BlockStage:
        """Sets the mode of all modules, also of the model around the stage."""
        self._root[0].training = mode
        return super().train(mode)

    def _skip(self, *_: Any, **__: Any) -> Any:
        return self.arrived

    def _stop(self, *_: Any, **__: Any) -> Any:
        raise _Reached

    def _assembled(
        self, model: nn.Module, name: str, own: set[str], found: RepeatedBlocks, parents: set[str]
    ) -> nn.Module:
        """Returns the module of this name with this stage's modules, and the others without
        weights."""
        if name in own:
            return model.get_submodule(name)
        if name not in parents:
            hollow: nn.Module = shell(found.hollows[name])
            return hollow
        result: nn.Module = shell(model.get_submodule(name))
        if not self._is_first:
            empty_tensors(result)
        children = own_children(result)
        for child, module in children.items():
            path = f"{name}.{child}" if name else child
            if module is not None:
                children[child] = self._assembled(model, path, own, found, parents)
        return result


class _CalledModel:
    """A model as a function calls it, of which a stage computes its part."""

    def __init__(self, model: nn.Module, stage: BlockStage, *, is_last: bool) -> None:
        self._model, self._stage, self._is_last = model, stage, is_last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        result = self._stage(*arguments, **keywords)
        if self._is_last:
            return result
        raise _Ended(result)


def block_stages(model: nn.Module, found: RepeatedBlocks, stages: int) -> list[BlockStage]:
    """Cuts a model between its blocks, into stages of similar cost."""
    firsts = cut_stages(found.costs, stages)
    ends = [*firsts[1:], len(found.blocks)]
    return [BlockStage(model, found, a, b) for a, b in zip(firsts, ends, strict=True)]


def check_stages(
    expected: Any, stages: Sequence[BlockStage], run: Callable[[nn.Module], Any]
) -> None:
    """Compares the stages' result with that of the model. `run` calls a module with an example.

    Raises `ValueError` if they differ: then a stage needs more than the result of the block before.
    """
    result = None
    for stage in stages:
        try:
            with stage.resuming(result):
                result = run(stage)
        except Exception as error:
            raise ValueError(f"fails as stages of blocks: {error}") from error
    # without the tensors inside other objects, such as caches
    ours, theirs = Frame.of(result)[1], Frame.of(expected)[1]
    if len(ours) != len(theirs) or not all(map(_are_equal, ours, theirs)):
        raise ValueError(
            "uses more in its blocks, or after them, than the batch and the result of the block "
            "before"
        )


def _are_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Returns True for the same bits, or NaN in both, as the loss of a part without labels."""
    same = ours.shape == theirs.shape and ours.dtype == theirs.dtype
    return same and torch.allclose(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)
