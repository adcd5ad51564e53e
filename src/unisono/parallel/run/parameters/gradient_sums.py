"""The sums of a step's gradients over ranks: after the passes, or in a thread while they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from unisono.parallel.data_parallelism.gradient_watch import GradientWatch
from unisono.parallel.run.parameters.parameter_sets import (
    BucketGradient,
    GradientBucket,
    ParameterSet,
)
from unisono.parallel.run.step.run_clock import RunClock
from unisono.parallel.training_mesh import TrainingMesh
from unisono.torch_backend import default_communicator


class OverlappedSums:
    """Sums buckets of gradients as soon as passes have computed them.

    A gradient is complete in the last backward pass of the last stage that has the parameter: after
    the last addition that the pass before had (`GradientWatch`), else after the pass. A thread sums
    complete buckets in one order, which all ranks learn from the first step, because gradients may
    become complete in other orders on other ranks. Until then, buckets are summed after the passes.
    """

    def __init__(
        self,
        buckets: Sequence[GradientBucket],
        stages: Sequence[tuple[int, nn.Module]],
        mesh: TrainingMesh,
        run: Callable[[GradientBucket], None],
    ) -> None:
        """`buckets`: in an order that all ranks have in common. The thread calls `run`, which sums
        a bucket."""
        self._mesh, self._run = mesh, run
        every = dict.fromkeys(each for bucket in buckets for each in bucket.gradients)
        self._gradients: list[BucketGradient] = [*every]
        self._numbers = {each.held.values: n for n, each in enumerate(self._gradients)}
        self._order(buckets)
        self._of_stage = {
            stage: [self._numbers[each] for each in module.parameters() if each in self._numbers]
            for stage, module in stages
        }
        self._stages_of = Counter(each for found in self._of_stage.values() for each in found)
        self._watch = GradientWatch([*self._numbers], self._added)
        self._unsteady: set[int] = set()
        """The gradients that programs change after autograd has added to them."""
        self._is_learned = False
        self._in_last_pass = False
        self._submitted: list[Future[None]] = []
        self._pool = ThreadPoolExecutor(1, "unisono-gradients")
        mesh.closing.append(self._close)
        self.begin()

    def _order(self, buckets: Sequence[GradientBucket]) -> None:
        self._buckets = buckets
        self._buckets_of: list[list[int]] = [[] for _ in self._gradients]
        for place, bucket in enumerate(buckets):
            for each in bucket.gradients:
                self._buckets_of[self._numbers[each.held.values]].append(place)

    def begin(self) -> None:
        """Begins a step."""
        self._incomplete = [len(each.gradients) for each in self._buckets]
        self._stages_left = self._stages_of.copy()
        self._versions: dict[int, int] = {}
        """The version of each gradient after autograd has added to it."""
        self._complete: set[int] = set()
        self._turns: dict[int, int] = {}
        """The place of each gradient in the order in which autograd has added to them last."""
        self._turn = 0

    @contextmanager
    def last_pass(self, stage: int) -> Iterator[None]:
        """Surrounds the last backward pass of a stage in a step."""
        self._in_last_pass = True
        try:
            yield
        except BaseException:
            self._watch.forget_pass()
            raise
        finally:
            self._in_last_pass = False
        self._watch.end_pass()
        for number in self._of_stage[stage]:
            self._stages_left[number] -= 1
            if not self._stages_left[number] and number not in self._complete:
                version = self._gradients[number].version()
                if self._versions.setdefault(number, version) != version:
                    self._unsteady.add(number)
                if number not in self._turns or number in self._unsteady:
                    self._take_turn(number)
                self._finish_gradient(number, version)

    def _added(self, number: int) -> None:
        """Notes that autograd has added to a gradient."""
        is_last = self._in_last_pass and self._stages_left[number] == 1
        if not is_last or number in self._complete:
            return
        version = self._versions[number] = self._gradients[number].version()
        self._take_turn(number)
        if version < 0:  # the program has put another tensor in place of the gradient
            self._unsteady.add(number)
        if self._watch.count(number) and number not in self._unsteady:
            self._finish_gradient(number, version)

    def _take_turn(self, number: int) -> None:
        self._turn += 1
        self._turns[number] = self._turn

    def _finish_gradient(self, number: int, version: int) -> None:
        self._complete.add(number)
        self._versions[number] = version
        for place in self._buckets_of[number]:
            self._incomplete[place] -= 1
        if self._is_learned:
            self._submit_complete()

    def _submit_complete(self) -> None:
        """Submits the next buckets in the common order, as far as they are complete."""
        while (place := len(self._submitted)) < len(self._buckets) and not self._incomplete[place]:
            self._submit(self._buckets[place])

    def _submit(self, bucket: GradientBucket) -> None:
        with torch.no_grad():
            bucket.collect()
        self._submitted.append(self._pool.submit(self._run, bucket))

    def finish(self) -> str | None:
        """Sums what is left after the passes, and waits for all sums. Collective.

        Returns the name of a parameter whose gradient has changed after its sum had begun.
        """
        changed = self._changed()
        for bucket in self._buckets[len(self._submitted) :]:
            self._submit(bucket)
        submitted, self._submitted = self._submitted, []
        for each in submitted:
            each.result()
        return changed

    def _changed(self) -> str | None:
        found = None
        for number in sorted(self._complete):
            gradient = self._gradients[number]
            if gradient.version() == self._versions[number]:
                continue
            self._unsteady.add(number)
            if any(place < len(self._submitted) for place in self._buckets_of[number]):
                found = found or gradient.held.name
        return found

    def learn(self) -> None:
        """Learns the order of the buckets in the first step that all ranks have ended. Collective.

        A bucket has the place of its last gradient, on the rank where this place is the last.
        """
        if self._is_learned:
            return
        self._is_learned = True
        last: dict[str, int] = {}
        for turns in self._mesh.of_all_ranks(self._bucket_turns()):
            for name, turn in turns.items():
                last[name] = max(turn, last.get(name, 0))
        self._order(sorted(self._buckets, key=lambda each: (last[each.name], each.name)))

    def _bucket_turns(self) -> dict[str, int]:
        """Returns the place of each bucket's last gradient, by the bucket's name."""
        found = {each.name: 0 for each in self._buckets}
        for number, places in enumerate(self._buckets_of):
            for place in places:
                name = self._buckets[place].name
                found[name] = max(found[name], self._turns.get(number, len(self._buckets_of)))
        return found

    def _close(self) -> None:
        self._watch.close()
        self._pool.shutdown()


_NAME = "gradients"


class GradientSums:
    """Sums the gradients of sets: those with buckets while passes run, the others after them.

    Make this object before the optimizer, because it registers hooks of parameters.
    """

    def __init__(
        self,
        sets: Sequence[ParameterSet],
        stages: Sequence[tuple[int, nn.Module]],
        mesh: TrainingMesh,
    ) -> None:
        comm = default_communicator()
        assert comm is not None, "a mesh needs the backend unisono"
        self.clock = RunClock(comm.timeline)
        self._every = sets
        self._later = [each for each in sets if not each.buckets]
        self._later_bytes = sum(held.values.nbytes for each in self._later for held in each.held)
        self._overlapped: OverlappedSums | None = None
        if mesh.has_overlap:
            # backward passes compute the gradients of the last modules first
            buckets = [each for found in sets for each in found.buckets][::-1]
            self._overlapped = OverlappedSums(buckets, stages, mesh, self._run)

    def begin(self) -> None:
        """Begins a step."""
        if self._overlapped is not None:
            self._overlapped.begin()

    def last_pass(self, stage: int) -> AbstractContextManager[None]:
        """Returns the context of the last backward pass of a stage in a step."""
        return nullcontext() if self._overlapped is None else self._overlapped.last_pass(stage)

    @torch.no_grad()
    def _run(self, bucket: GradientBucket) -> None:
        with self.clock.exchange(_NAME, bucket.nbytes):
            bucket.sum()

    def finish(self) -> None:
        """Ends all sums after the passes. Collective.

        Raises `ValueError` at the end if a gradient has changed after its sum had begun.
        """
        changed = None
        if self._overlapped is not None:
            for each in self._every:
                each.collect()
            changed = self._overlapped.finish()
        if self._later or self._overlapped is None:
            with self.clock.exchange(_NAME, self._later_bytes):
                for each in self._later:
                    each.reduce()
        if changed is not None:
            raise ValueError(
                f"{changed}: its gradient changed while ranks already summed it, unlike in the "
                "steps before; no rank has changed its weights, so take the step again: from now "
                "on this gradient is summed after the passes"
            )

    def learn(self) -> None:
        """Learns from the first step that all ranks have ended. Collective in that step."""
        if self._overlapped is not None:
            self._overlapped.learn()
