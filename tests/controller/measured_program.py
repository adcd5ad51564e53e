"""A simulated program of several ranks. The times of its buckets follow a known link cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from unisono.controller.fusion.buckets import Bucket
from unisono.controller.fusion.fusion_choice import predicted_s
from unisono.controller.fusion.fusion_report import FusionReport
from unisono.controller.fusion.fusion_times import LinkCost
from unisono.controller.fusion.fusion_trial import PassTimes, Trial, sampled
from unisono.controller.fusion.fusion_tuner import FusionTuner
from unisono.controller.request import Request
from unisono.types import DType

Noise = Callable[[random.Random, int], float]
"""Returns the factor of the time of a step, by its number."""


def gradient(name: str, count: int = 1, **options: object) -> Request:
    """Returns the request of a tensor with `count` float32 elements."""
    given = {"operation": "all_reduce", "dtype": DType.FLOAT32, "shape": (count,)}
    return Request(name=name, **(given | options))


def cut(requests: Sequence[Request], ends: Sequence[int]) -> tuple[Bucket, ...]:
    """Returns buckets of consecutive tensors. `ends` has the index of the first tensor after each
    bucket.
    """
    begins = [0, *ends[:-1]]
    return tuple(Bucket(tuple(requests[i:j])) for i, j in zip(begins, ends, strict=True))


def all_cuts(requests: Sequence[Request]) -> Iterator[tuple[Bucket, ...]]:
    """Yields all divisions of the tensors into buckets of consecutive tensors."""
    count = len(requests)
    for chosen in range(count):
        for inner in combinations(range(1, count), chosen):
            yield cut(requests, (*inner, count))


@dataclass(frozen=True)
class MeasuredProgram:
    """A program whose tensors become ready in each step at the times `ready_s`, and are sent over a
    link of `cost`. A step ends `tail_s` seconds after its last bucket.
    """

    requests: tuple[Request, ...]
    ready_s: tuple[float, ...]
    cost: LinkCost
    tail_s: float = 0.0
    ranks: int = 2
    jitter: float = 0.0
    """Largest relative error of one measured time of a bucket or a tensor."""

    def step_s(self, buckets: Sequence[Bucket]) -> float:
        """Returns the exact time of a step in seconds."""
        names = [request.name for request in self.requests]
        ready_s = dict(zip(names, self.ready_s, strict=True))
        return predicted_s(buckets, ready_s, self.cost) + self.tail_s

    def best_s(self) -> float:
        """Returns the time of a step with the best division into buckets of consecutive tensors."""
        return min(map(self.step_s, all_cuts(self.requests)))

    def measure(
        self, own: Sequence[Bucket], trial: Trial, chance: random.Random, noise: Noise
    ) -> list[PassTimes]:
        """Returns the times that each rank measures in the passes of a trial.

        In each pass a different rank is the last to become ready. The bucket times of the other
        ranks include the wait for this rank.
        """
        both = (tuple(own), trial.other)
        steps_s = [
            self.step_s(both[which]) * noise(chance, number)
            for number, which in enumerate(trial.order[:-1])
        ]
        found = []
        for rank in range(self.ranks):
            buckets = [
                self._buckets_s(both[which], chance, rank == number % self.ranks)
                for number, which in enumerate(trial.order[:-1])
            ]
            ready = [at * self._jitter(chance) for at in self.ready_s]
            found.append(
                PassTimes(
                    tuple(round(1e9 * s * chance.uniform(0.99, 1.0)) for s in steps_s),
                    tuple(round(1e9 * at) for at in ready) if trial.details else (),
                    tuple(tuple(round(1e9 * s) for s in each) for each in buckets)
                    if trial.details
                    else (),
                )
            )
        return found

    def _buckets_s(
        self, buckets: Sequence[Bucket], chance: random.Random, is_last: bool
    ) -> list[float]:
        waited_s = 0.0 if is_last else chance.uniform(0.0, 2 * self.cost.time_s(0) + 1e-6)
        return [
            self.cost.time_s(buckets[i].nbytes) * self._jitter(chance) + waited_s
            for i in sampled(len(buckets))
        ]

    def _jitter(self, chance: random.Random) -> float:
        return 1.0 + chance.uniform(-self.jitter, self.jitter)


def tune(
    program: MeasuredProgram,
    buckets: tuple[Bucket, ...],
    *,
    seed: int = 0,
    noise: Noise = lambda chance, number: 1.0,
    tuner: FusionTuner | None = None,
) -> FusionReport:
    """Runs the trials of a tuner until it has chosen buckets. Returns the tuner's report."""
    chance = random.Random(seed)
    tuner, plan = (tuner or FusionTuner(seed=seed)).freeze(buckets)
    while plan.report is None:
        assert plan.trial is not None
        times = program.measure(plan.buckets, plan.trial, chance, noise)
        tuner, plan = tuner.finish(times)
    assert plan.trial is None
    return plan.report
