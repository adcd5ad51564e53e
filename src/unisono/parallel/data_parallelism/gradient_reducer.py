"""Averages a model's gradients over all ranks while its backward pass still runs.

Each gradient is submitted to the controller as soon as autograd has accumulated it. At the end of
the backward pass the reducer waits for all averages, so that clipping, GradScaler and any other
code after `backward()` sees averaged gradients.

Beside the gradients, the ranks exchange one vector of flags, which mark the parameters that each
rank used. A parameter that no rank used keeps its gradient unchanged.

Each kind of gradient (dense, sparse or compressed) has a `GradientExchange` that averages it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from unisono.controller import Controller, Handle
from unisono.errors import UnisonoError
from unisono.parallel.data_parallelism.gradient_exchange import (
    GradientExchange,
    PendingAverage,
    SparseExchange,
    finish_first_rounds,
    sparse_zero,
)
from unisono.parallel.data_parallelism.gradient_watch import GradientWatch
from unisono.torch_backend import run_after_backward

_FLAGS = "gradient flags"
_DENSE, _SPARSE, _FAILED = 1.0, 2.0, 1.0


@dataclass(slots=True)
class _Gradient:
    """A parameter, and the progress of its gradient in the current backward pass."""

    name: str
    parameter: nn.Parameter
    index: int
    pending: PendingAverage | None = None
    sparse: bool = False
    """True if the gradient was sparse on at least one rank in the first backward pass."""
    local: bool = False
    """True if passes inside `no_sync` accumulated into the gradient since the last average."""


class GradientReducer:
    """Averages the gradients of named parameters at each backward pass.

    Raises `UnisonoError` in `backward()` if another rank's backward pass failed, and the errors of
    the controller, such as `MismatchError` if the ranks' parameters differ.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        controller: Controller,
        dense: GradientExchange,
        prefix: str = "",
    ) -> None:
        """`dense` averages all gradients that are not sparse.

        The names of the tensors that the controller receives begin with `prefix`.
        """
        self.controller = controller
        self.enabled = True
        """True if backward passes average their gradients. False inside `no_sync`."""
        self._prefix = prefix
        self._gradients = [
            _Gradient(name, parameter, index)
            for index, (name, parameter) in enumerate(parameters.items())
        ]
        self._in_pass = False
        self._learned = False
        self._flags: Handle
        self._lock = threading.Lock()
        self._dense = dense
        self._sparse = SparseExchange(controller, prefix)
        self._watch = GradientWatch([*parameters.values()], self._added)

    def prepare(self) -> None:
        """Prepares for a forward pass: ends a failed backward pass, and updates the hooks."""
        self.recover()
        self._watch.update()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients inside the `with` block, without averaging them.

        The next backward pass after the block averages the accumulated gradients.
        """
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def recover(self) -> None:
        """Ends a backward pass that raised on this rank, so that no other rank waits for it.

        `prepare` calls it before the next forward pass. The other ranks raise `UnisonoError`.
        """
        if self._in_pass:
            with self._ending():
                self._submit_flags(failed=True)
                if not self._learned:
                    self._learn()
                else:
                    self._submit_late()
                self._begin_second_rounds()
                self._collect()

    def close(self) -> None:
        """Removes the hooks."""
        self._watch.close()

    def _added(self, number: int) -> None:
        gradient = self._gradients[number]
        if not self.enabled:
            gradient.local = True
            return
        with self._lock:
            if not self._in_pass:
                self._in_pass = True
                run_after_backward(self._submit_rest)
            is_last = self._watch.count(number)
            if gradient.pending is not None:
                found, expected = self._watch.counts[number], self._watch.expected[number]
                raise UnisonoError(
                    f"the gradient of {gradient.name!r} was accumulated {found} times in this "
                    f"backward pass, but {expected} times in the last one: it changed while it was "
                    "being averaged"
                )
            if self._learned and is_last:
                self._submit(gradient)

    def _submit(self, gradient: _Gradient) -> None:
        grad = gradient.parameter.grad
        if grad is None:
            return
        if grad.is_sparse and not gradient.sparse:
            grad = gradient.parameter.grad = grad.to_dense()
        self._begin(gradient, grad)

    def _begin(self, gradient: _Gradient, grad: torch.Tensor) -> None:
        exchange = self._sparse if gradient.sparse else self._dense
        # Hooks mostly run with gradients disabled. Then `no_grad` would only cost time.
        if not torch.is_grad_enabled():
            gradient.pending = exchange.begin(gradient.name, grad)
            return
        with torch.no_grad():
            gradient.pending = exchange.begin(gradient.name, grad)

    # ---- The end of a backward pass. Several reducers may share one pass. Each reducer submits all
    # its gradients before any reducer waits, so ranks may run the reducers in different orders.

    def _submit_rest(self) -> None:
        with self._ending(more=True):
            self._submit_flags(failed=False)
            if self._learned:
                self._submit_late()
            run_after_backward(self._wait_for_flags)

    def _wait_for_flags(self) -> None:
        with self._ending(more=True):
            if not self._learned:
                self._learn()
            run_after_backward(self._wait_for_first_rounds)

    def _wait_for_first_rounds(self) -> None:
        with self._ending(more=True):
            self._begin_second_rounds()
            run_after_backward(self._wait_for_all)

    def _wait_for_all(self) -> None:
        with self._ending():
            if self._collect():
                raise UnisonoError("the backward pass of another rank raised: see its output")

    @contextmanager
    def _ending(self, *, more: bool = False) -> Iterator[None]:
        """Runs one phase of the end of a backward pass.

        Resets the state of the pass after an error or after the last phase (`more` is False).
        """
        try:
            yield
        except BaseException:
            self._end()
            raise
        if not more:
            self._learned = True
            self._end()

    def _end(self) -> None:
        self._watch.end_pass()
        for gradient in self._gradients:
            gradient.pending, gradient.local = None, False
        self._in_pass = False

    def _active(self) -> list[_Gradient]:
        return [each for each in self._gradients if each.parameter.requires_grad]

    def _is_used(self, gradient: _Gradient) -> bool:
        """Returns True if this pass has added to the gradient."""
        return self._watch.counts[gradient.index] > 0

    def _submit_flags(self, *, failed: bool) -> None:
        flags = [0.0] * (len(self._gradients) + 1)
        for gradient in self._active():
            grad = gradient.parameter.grad
            if (self._is_used(gradient) or gradient.local) and grad is not None:
                flags[gradient.index] = _SPARSE if grad.is_sparse else _DENSE
        flags[-1] = _FAILED if failed else 0.0
        values = torch.tensor(flags, dtype=torch.float32)
        self._flags = self.controller.all_reduce(self._prefix + _FLAGS, values, "max")

    def _learn(self) -> None:
        """In the first pass, learns from the flags which gradients are sparse, and submits all."""
        flags = self._flags.wait().tolist()
        for gradient in self._active():
            gradient.sparse = flags[gradient.index] == _SPARSE
        self._submit_late()

    def _submit_late(self) -> None:
        """Submits the gradients that no hook has submitted."""
        for gradient in self._active():
            if gradient.pending is not None:
                continue
            # After a failed pass, the program may have removed the gradients.
            if self._is_used(gradient) and gradient.parameter.grad is not None:
                self._submit(gradient)
            else:
                self._submit_substitute(gradient)

    def _submit_substitute(self, gradient: _Gradient) -> None:
        # The parameter is unused in this pass. Submits what earlier passes left in its gradient:
        # the other ranks' gradients contain what earlier passes left, too.
        parameter, grad = gradient.parameter, gradient.parameter.grad
        if grad is not None:
            mine = grad.detach().clone()
            mine = mine.to_dense() if mine.is_sparse and not gradient.sparse else mine
        else:
            mine = sparse_zero(parameter) if gradient.sparse else torch.zeros_like(parameter)
        self._begin(gradient, mine)

    @torch.no_grad()
    def _begin_second_rounds(self) -> None:
        active = (gradient.pending for gradient in self._active())
        finish_first_rounds([pending for pending in active if pending is not None])

    @torch.no_grad()
    def _collect(self) -> bool:
        """Waits for all averages. Returns True if the backward pass of a rank failed."""
        flags = self._flags.wait().tolist()
        failed = bool(flags[-1])
        for gradient in self._active():
            self._take(gradient, used=bool(flags[gradient.index]) and not failed)
        return failed

    def _take(self, gradient: _Gradient, *, used: bool) -> None:
        parameter, pending = gradient.parameter, gradient.pending
        assert pending is not None
        average = pending.finish(used=used)
        if not used or average is parameter.grad:
            return  # no rank used the parameter, a rank failed, or `grad` already is the average
        if parameter.grad is None or gradient.sparse:
            parameter.grad = average
        else:
            parameter.grad.copy_(average)
