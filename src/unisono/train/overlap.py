"""An example of overlap: 96 layers with 12 gradients each, exchanged during or after backward.

It takes `compute_s` seconds to compute a gradient and `exchange_s` to exchange it. The link carries
one message at a time. Every case runs through the controller. The computation is only a wait, like
that of a processor for an accelerator. The link is a `LinkTransfer`, which really sends the data,
and ends each message when the simulated link would have carried it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

import unisono
from unisono.communicator import Communicator
from unisono.controller import (
    CommunicatorTransfer,
    Controller,
    Handle,
    LinkCost,
    LinkTransfer,
    LinkUse,
    best_ends,
    finish_s,
)

_ELEMENTS = 64
_WARM_UP_STEPS = 8
_SLEEP_S = 300e-6
"""Upper bound of the delay after a sleep, in seconds; shorter waits poll the clock instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The sizes and times of the example. Times are per gradient."""

    layers: int = 96
    per_layer: int = 12
    compute_s: float
    exchange_s: float
    latency_share: float = 0.5
    """Fraction of `exchange_s` that does not depend on the size of the message."""

    def __post_init__(self) -> None:
        for name in ("layers", "per_layer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("compute_s", "exchange_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected seconds above 0, got {getattr(self, name)}")
        if not 0 <= self.latency_share <= 1:
            raise ValueError(f"latency_share: expected 0 to 1, got {self.latency_share}")

    @staticmethod
    def lasting(seconds: float, *, ratio: float, **others: Any) -> Example:
        """Returns an example whose serial step takes `seconds`.

        An exchange takes `ratio` times as long as a computation.
        """
        sizes = Example(compute_s=1.0, exchange_s=ratio, **others)
        compute_s = seconds / (sizes.gradients * (1 + ratio))
        return Example(compute_s=compute_s, exchange_s=ratio * compute_s, **others)

    @property
    def gradients(self) -> int:
        """Number of gradients."""
        return self.layers * self.per_layer

    @property
    def nbytes(self) -> list[float]:
        """Bytes of each gradient."""
        return [4.0 * _ELEMENTS] * self.gradients

    @property
    def cost(self) -> LinkCost:
        """Cost model of a message on the link."""
        latency_s = self.latency_share * self.exchange_s
        s_per_byte = (self.exchange_s - latency_s) / (4 * _ELEMENTS)
        return LinkCost(latency_s=latency_s, s_per_byte=s_per_byte)

    def ready_s(self, *, overlaps: bool) -> list[float]:
        """Returns the time at which the exchange of each gradient may begin, in seconds."""
        count = self.gradients
        return [self.compute_s * (j + 1 if overlaps else count) for j in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case of the example: when gradients are exchanged, and in which buckets."""

    name: str
    overlaps: bool
    """True if each gradient is submitted as soon as it is computed; False if all are submitted at
    the end."""
    ends: tuple[int, ...]
    """Index after the last gradient of each bucket."""

    def predicted_s(self, example: Example) -> float:
        """Returns the predicted time of a step in seconds, from the closed form."""
        ready_s = example.ready_s(overlaps=self.overlaps)
        return finish_s(ready_s, example.nbytes, self.ends, example.cost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A measured step. `computed_s`: seconds from the beginning of the step to the end of each
    gradient's computation."""

    seconds: float
    computed_s: tuple[float, ...]
    link: tuple[LinkUse, ...]
    """Transfers on the link, with times from the beginning of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """A case, its prediction, and its measured steps."""

    case: Case
    predicted_s: float
    steps: tuple[Step, ...]

    @property
    def measured_s(self) -> float:
        """Median time of a step, in seconds."""
        return median(step.seconds for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapResult:
    """The results of all cases of an example. The first is serial; the second overlaps."""

    example: Example
    cases: tuple[CaseResult, ...]

    @property
    def hideable_s(self) -> float:
        """Seconds of the serial step that the overlap can hide, by the closed form."""
        return self.cases[0].predicted_s - self.cases[1].predicted_s

    @property
    def hidden_s(self) -> float:
        """Seconds of the serial step that the overlap hid, from the measured times."""
        return self.cases[0].measured_s - self.cases[1].measured_s


def cases_of(example: Example) -> tuple[Case, ...]:
    """Returns four cases, with or without overlap and fusion, and a case with the best buckets."""
    count, per_layer = example.gradients, example.per_layer
    alone = tuple(range(1, count + 1))
    by_layer = tuple(range(per_layer, count + 1, per_layer))
    best = best_ends(example.ready_s(overlaps=True), example.nbytes, example.cost)
    return (
        Case(name="serial", overlaps=False, ends=alone),
        Case(name="overlapped", overlaps=True, ends=alone),
        Case(name="fused by layer", overlaps=False, ends=by_layer),
        Case(name="overlapped, fused by layer", overlaps=True, ends=by_layer),
        Case(name="overlapped, best buckets", overlaps=True, ends=best),
    )


def run_overlap(example: Example, *, ranks: int, rounds: int) -> OverlapResult:
    """Runs all cases alternately on local ranks, and returns the measurements of rank 0."""
    cases = cases_of(example)
    steps = unisono.run(_program, ranks=ranks, args=(example, cases, rounds))[0]
    results = (
        CaseResult(case=case, predicted_s=case.predicted_s(example), steps=tuple(measured))
        for case, measured in zip(cases, steps, strict=True)
    )
    return OverlapResult(example=example, cases=tuple(results))


# ---- the program of a rank


def _program(example: Example, cases: Sequence[Case], rounds: int) -> list[list[Step]]:
    with unisono.init() as comm:
        programs = [_Program(comm, example, case) for case in cases]
        steps: list[list[Step]] = [[] for _ in cases]
        for round_ in range(rounds):
            order = range(len(cases))
            for index in order if round_ % 2 == 0 else reversed(order):
                comm.barrier()
                steps[index].append(programs[index].step())
        comm.barrier()
        for program in programs:
            program.close()
        return steps


class _Program:
    """One case on one rank, with a controller of its own."""

    def __init__(self, comm: Communicator, example: Example, case: Case) -> None:
        self._example = example
        self._case = case
        self._link = LinkTransfer(CommunicatorTransfer.over(comm), example.cost)
        self._controller = Controller(comm, fusion_bytes=0, transfer=self._link)
        self._names = [f"gradient {j}" for j in range(example.gradients)]
        self._gradients = [np.zeros(_ELEMENTS, np.float32) for _ in self._names]
        begin = 0
        for end in case.ends:
            if end - begin > 1:
                self._controller.group(self._names[begin:end])
            begin = end
        self._link.enabled = False  # no simulated link until the controller's plan is frozen
        for _ in range(_WARM_UP_STEPS):
            for handle in [self._submit(j) for j in range(example.gradients)]:
                handle.wait()
        self._link.enabled = True

    def step(self) -> Step:
        """Computes and exchanges all gradients once, and checks their sums."""
        rank, size = self._controller.rank, self._controller.size
        for gradient in self._gradients:
            gradient.fill(rank)
        self._link.uses.clear()
        begun_s = time.perf_counter()
        computed_s = []
        handles: list[Handle] = []
        for j in range(len(self._names)):
            computed_s.append(_compute_until(begun_s + (j + 1) * self._example.compute_s))
            if self._case.overlaps:
                handles.append(self._submit(j))
        if not self._case.overlaps:
            handles += [self._submit(j) for j in range(len(self._names))]
        for handle in handles:
            handle.wait()
        seconds = time.perf_counter() - begun_s
        assert all((gradient == sum(range(size))).all() for gradient in self._gradients)
        return Step(
            seconds=seconds,
            computed_s=tuple(at_s - begun_s for at_s in computed_s),
            link=tuple(
                replace(use, begun_s=use.begun_s - begun_s, ended_s=use.ended_s - begun_s)
                for use in self._link.uses
            ),
        )

    def close(self) -> None:
        self._controller.close()

    def _submit(self, j: int) -> Handle:
        return self._controller.all_reduce(self._names[j], self._gradients[j])


def _compute_until(until_s: float) -> float:
    """Waits until a time, in place of a computation. Returns the time at the end."""
    while (now_s := time.perf_counter()) < until_s:
        if until_s - now_s > _SLEEP_S:
            time.sleep(until_s - now_s - _SLEEP_S)
    return now_s
