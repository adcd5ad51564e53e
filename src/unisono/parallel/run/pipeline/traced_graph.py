"""The graph of a model's forward pass, traced by torch.export as a function of tensors."""

from __future__ import annotations

import copy
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from unisono.errors import UnsupportedError
from unisono.parallel.run.batch.batch_tree import BatchTree, Frame
from unisono.parallel.run.batch.model_call import ModelCall
from unisono.parallel.run.loss.own_loss import LossWatch, TracedLoss, model_loss
from unisono.parallel.run.step.graph_checks import functions_of, graph_nodes
from unisono.torch_backend import is_type_check, own_buffers, own_parameters

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)


def _plain(leaf: Any) -> Any:
    """Returns a leaf of an output; None for other objects, such as caches of attention."""
    return leaf if isinstance(leaf, _PLAIN) else None


class TracedCall:
    """A forward pass as a function of a batch's tensors, which returns the tensors of its output.

    With the model's own loss, these are the loss and its weight.
    """

    def __init__(self, call: ModelCall, example: BatchTree, *, needs_loss: bool) -> None:
        """`example`: a microbatch as the model receives it. `needs_loss`: the output is needed for
        its own loss alone."""
        self._call, self.example, self._needs_loss = call, example, needs_loss
        self._frame: Frame | None = None
        """The frame around the tensors of an output, from the last call."""
        self._problem: str | None = None
        """The reason why the weight of the loss is not known."""

    def module(self, model: nn.Module) -> nn.Module:
        """Returns a module with the parameters of a model, under their names, that is called with
        the tensors of a batch."""
        found = copy.copy(model)
        found.forward = partial(self._forward, model)
        return found

    def _forward(self, model: nn.Module, *tensors: torch.Tensor) -> Any:
        value = self.example.with_tensors(tensors)
        if not self._needs_loss:
            output = self._call.on_example(model, value)
            self._frame, found = Frame.of(output, _plain)
            if not found:
                raise ValueError(f"the model returns no tensor, but {type(output).__name__}")
            return found[0] if len(found) == 1 else tuple(found)
        watch = LossWatch()
        with watch.passing():
            loss = model_loss(self._call.on_example(model, value), value)
        try:
            known, targets = watch.known(loss)
        except ValueError as error:  # the batch may have one part only
            self._problem = str(error)
            return loss
        if known.is_sum:
            return loss
        return loss, torch.as_tensor(known.weight(targets)).double()

    def output_of(self, results: Any) -> Any:
        """Returns the output of the model from the results of the graph."""
        several: Sequence[Any] = results if isinstance(results, (tuple, list)) else [results]
        if self._frame is not None:
            return self._frame.filled(several)
        weight = several[1] if len(several) > 1 else None
        return TracedLoss(several[0], weight, self._problem)


@dataclass(frozen=True, kw_only=True)
class TracedGraph:
    """A model's forward pass as a graph. Its attributes are the model's parameters and buffers."""

    module: fx.GraphModule
    flops: dict[fx.Node, int]
    """Floating-point operations of each node, as torch counts them."""
    values: dict[fx.Node, Any]
    """The result of each node, as tensors without data."""


def trace(model: nn.Module, *example: torch.Tensor) -> TracedGraph:
    """Traces the forward pass of a model for inputs like `example`. The model returns a tensor, or
    a tuple of tensors.

    No value is computed and no weight is copied. Raises `ValueError`, in one line, for a model that
    has no such graph: its forward pass branches on values of tensors, uses a subclass of
    `torch.autograd.Function` (the graph would lose its backward pass).
    """
    name = type(model).__name__
    try:
        with _quiet():
            exported = torch.export.export(model, example, strict=False)
    except Exception as error:  # torch.export raises errors of many types
        raise ValueError(_reason(name, error)) from error
    module = exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    _remove_type_checks(module)
    first = next(node for node in module.graph.nodes if node.op == "placeholder")
    mode = first.meta["val"].fake_mode  # torch.export has traced with tensors without data
    try:
        output = _output_without_data(model, example, mode)
    except Exception as error:  # of the model
        raise ValueError(_reason(name, error)) from error
    _refuse_functions(name, output)
    return _measure(module, example, mode)


def _remove_type_checks(module: fx.GraphModule) -> None:
    """Removes the checks by which a traced conversion `x.to(dtype)` expects the type of x that it
    had in the trace: under autocast, x has another type.
    """
    for node in list(module.graph.nodes):
        if is_type_check(node.target):
            module.graph.erase_node(node)
    module.recompile()


def _reason(name: str, error: Exception) -> str:
    """Returns one line about an error of torch.export."""
    text = " ".join(str(error).split())
    what = f"torch.export cannot trace {name}"
    if isinstance(error, UnsupportedError):
        return (
            f"{what}: its forward pass exchanges data between ranks, which tensors without data "
            "cannot; pp = 1 or tp = 1 works"
        )
    if "data-dependent" in text or "data dependent" in text:
        return (
            f"{what}: its forward pass branches on values of tensors, so it has no fixed graph; "
            "pp = 1 works"
        )
    return f"{what}: {type(error).__name__}: {text[:200]}; pp = 1 works"


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides torch's report of a graph that cannot be traced, which it logs and prints: the error
    says it in one line."""
    logger = logging.getLogger("torch")
    before, printed = logger.level, io.StringIO()
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(printed):
            yield
    finally:
        logger.setLevel(before)
    sys.stderr.write(printed.getvalue())  # of the model


def _output_without_data(model: nn.Module, example: Sequence[torch.Tensor], mode: Any) -> Any:
    """Returns the output of a model as tensors without data, with their autograd graph."""
    # Each place once: for a module with two names, functional_call would not restore the tensors.
    tensors = {
        f"{prefix}.{key}" if prefix else key: mode.from_tensor(value, static_shapes=True)
        for prefix, module in model.named_modules()
        for key, value in (*own_parameters(module).items(), *own_buffers(module).items())
        if value is not None
    }
    inputs = tuple(mode.from_tensor(each, static_shapes=True) for each in example)
    with mode:
        return torch.func.functional_call(model, tensors, inputs, tie_weights=False)


def _refuse_functions(name: str, output: Any) -> None:
    """Raises `ValueError` if a model uses an autograd function that is written in Python."""
    for node in graph_nodes(functions_of(output)):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise ValueError(
                f"pp traces {name}, but its graph has no backward pass of the "
                f"autograd function {type(node).__name__.removesuffix('Backward')}; pp = 1 works"
            )


def _measure(module: fx.GraphModule, example: Sequence[torch.Tensor], mode: Any) -> TracedGraph:
    with mode, FlopCounterMode(display=False) as counter:
        interpreter = _Measurement(module, mode, counter)
        interpreter.run(*(mode.from_tensor(each, static_shapes=True) for each in example))
    return TracedGraph(module=module, flops=interpreter.flops, values=interpreter.values)


class _Measurement(fx.Interpreter):
    """Runs a graph on tensors without data; records the FLOPs and the result of each node."""

    def __init__(self, module: fx.GraphModule, mode: Any, counter: FlopCounterMode) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._mode, self._counter = mode, counter
        self._attributes: dict[str, Any] = {}
        self.flops: dict[fx.Node, int] = {}
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        before = self._counter.get_total_flops()
        value = super().run_node(n)
        self.flops[n] = self._counter.get_total_flops() - before
        self.values[n] = value
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, torch.Tensor):
            value = self._attributes.setdefault(
                target, self._mode.from_tensor(value, static_shapes=True)
            )
        return value
