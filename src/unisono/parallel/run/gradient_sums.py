"""The sums of a step's gradients over ranks: after the passes, or while they run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from unisono.parallel.run.overlapped_sums import OverlappedSums
from unisono.parallel.run.parameter_sets import GradientBucket, ParameterSet
from unisono.parallel.run.run_timeline import RunTimeline
from unisono.parallel.training_mesh import TrainingMesh
from unisono.torch_backend import default_communicator

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
        self.timeline = RunTimeline(comm.timeline)
        """The timeline of the run."""
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
        with self.timeline.exchange(_NAME, bucket.nbytes):
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
            with self.timeline.exchange(_NAME, self._later_bytes):
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
