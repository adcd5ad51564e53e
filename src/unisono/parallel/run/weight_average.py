"""An average of the weights of a run over its steps, divided as the optimizers' states are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import optim

from unisono.parallel.run.parallel_run import ParallelRun
from unisono.parallel.run.parameters.optimizers import AVERAGE


class WeightAverage:
    """The exponential moving average of a run's trained weights.

    Each step of an optimizer that changes weights makes their average `decay` x average + (1 -
    `decay`) x weight; the first step makes it the weight, as torch's `AveragedModel` does. The
    average is a state of the optimizers: ZeRO divides it, and checkpoints hold it for all layouts,
    so make it before `run.load`.

        average = WeightAverage(run, decay=0.999)
        run.step(batch)
        with average.in_place_of_weights():
            run.evaluate(batch)
            run.export(folder)
    """

    def __init__(self, run: ParallelRun, *, decay: float) -> None:
        """Raises `ValueError` for a decay that is not between 0 and 1, and for a run that has an
        average."""
        if not 0 <= decay < 1:
            raise ValueError(f"decay: expected a number from 0 to below 1, got {decay}")
        if run.average is not None:
            raise ValueError("WeightAverage: expected a run without an average, got a second one")
        self.decay, self._is_in_place = decay, False
        self._run = run
        self._first_update = self._updates()
        self._former: dict[torch.Tensor, torch.Tensor] = {}
        """The values before a step of arrays that no step has used, which are their averages."""
        run.average = self
        for each in run.optimizers:
            each.register_step_pre_hook(self._keep)
            each.register_step_post_hook(self._update)

    def _updates(self) -> int:
        """Returns the number of steps that have changed weights."""
        return self._run.steps - self._run.skipped_steps

    def _keep(self, optimizer: optim.Optimizer, _: Any, __: Any) -> None:
        if self._updates() != self._first_update:
            for array in _arrays(optimizer):
                if array.grad is not None and AVERAGE not in optimizer.state.get(array, {}):
                    self._former[array] = array.detach().clone()

    @torch.no_grad()
    def _update(self, optimizer: optim.Optimizer, _: Any, __: Any) -> None:
        for array in _arrays(optimizer):
            if AVERAGE in optimizer.state.get(array, {}):
                optimizer.state[array][AVERAGE].lerp_(array, 1 - self.decay)
            elif array in self._former:
                former = self._former.pop(array)
                optimizer.state[array][AVERAGE] = former.lerp_(array, 1 - self.decay)
            elif array.grad is not None:
                optimizer.state[array][AVERAGE] = array.detach().clone()

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Gives the run the averages in place of its weights, until the context ends. Collective.

        For `evaluate` and `export`. Steps, saves and loads inside are refused.
        """
        self._swap()
        self._is_in_place = True
        try:
            yield
        finally:
            self._swap()
            self._is_in_place = False

    def require_weights(self, call: str) -> None:
        """Raises `ValueError` while averages are in place of the weights."""
        if self._is_in_place:
            raise ValueError(
                f"{call}: the averages are in place of the weights; call {call} after "
                "in_place_of_weights has ended"
            )

    @torch.no_grad()
    def _swap(self) -> None:
        for optimizer in self._run.optimizers:
            for array, states in optimizer.state.items():
                if AVERAGE in states:
                    weights = array.detach().clone()
                    array.copy_(states[AVERAGE])
                    states[AVERAGE].copy_(weights)
        for each in self._run.sets:
            each.gather()


def _arrays(optimizer: optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
