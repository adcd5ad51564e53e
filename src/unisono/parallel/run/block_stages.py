"""Pipeline stages of a model that repeats a block.

Every stage runs the model's own forward pass with the whole batch. The blocks before its own return
what the stage before has sent, and the first block after its own ends the pass. Modules that run
before all blocks have no weights in later stages: only the shapes of their results count there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from unisono.parallel.run.batch_tree import replace_leaves
from unisono.parallel.run.model_stages import cut_stages
from unisono.parallel.run.repeated_blocks import RepeatedBlocks, parents_of
from unisono.torch_backend import empty_tensors, own_children, share_parts, shell


class _Reached(Exception):
    """The pass has reached the first block after those of a stage."""


class _Ended(BaseException):
    """A stage that is not the last has returned its result to a function that calls the model."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


class BlockStage(nn.Module):
    """Some blocks of a model, and the modules before or after all blocks, under their names."""

    def __init__(self, model: nn.Module, found: RepeatedBlocks, first: int, end: int) -> None:
        """Blocks from `first` up to `end`."""
        super().__init__()
        self._is_first, self._is_last = first == 0, end == len(found.blocks)
        own = set(found.blocks[first:end])
        own |= found.before if self._is_first else set()
        own |= found.after if self._is_last else set()
        self.arrived: Any = None
        """The result of the stage before, during a call."""
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
    ours, theirs = _tensors(result), _tensors(expected)
    if len(ours) != len(theirs) or not all(map(_are_equal, ours, theirs)):
        raise ValueError(
            "uses more in its blocks, or after them, than the batch and the result of the block "
            "before"
        )


def _are_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Returns True for the same bits, or NaN in both, as the loss of a part without labels."""
    same = ours.shape == theirs.shape and ours.dtype == theirs.dtype
    return same and torch.allclose(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)


def _tensors(output: Any) -> list[torch.Tensor]:
    """Returns the tensors of an output, without those inside other objects, such as caches."""
    found: list[torch.Tensor] = []

    def note(_: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        return leaf

    replace_leaves(output, note)
    return found
