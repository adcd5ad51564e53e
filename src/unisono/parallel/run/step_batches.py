"""This rank's part of the batch of each step."""

from __future__ import annotations

from typing import Any, Final

from unisono.parallel.run.batch_loss import BatchLoss
from unisono.parallel.run.batch_parts import BatchPart, divide_batch
from unisono.parallel.run.batch_tree import BatchTree
from unisono.parallel.run.local_batches import LocalBatches
from unisono.parallel.run.model_call import ModelCall
from unisono.parallel.run.step_agreement import StepAgreement
from unisono.parallel.training_mesh import TrainingMesh

NO_TARGETS: Final = object()
"""In place of targets, if a step has one batch of any nesting."""


class StepBatches:
    """Reads the batch that the program passes to a step, and divides it.

    With `batch="global"`, all ranks have the whole batch. With `"local"`, each rank of `dp` has its
    own part, which one of the ranks that share it passes.
    """

    def __init__(
        self,
        mesh: TrainingMesh,
        agreement: StepAgreement,
        call: ModelCall,
        loss: BatchLoss,
        *,
        is_local: bool,
    ) -> None:
        self._mesh, self._agreement, self._call, self._loss = mesh, agreement, call, loss
        self._local = LocalBatches(mesh, agreement) if is_local else None

    def divide(self, inputs: Any, targets: Any, microbatches: int) -> BatchPart:
        """Returns this rank's part, and prepares the loss for it. Collective with local batches.

        Raises `ValueError` for a batch that cannot be divided: with local batches on all ranks,
        unless the sizes do not fit the layout.
        """
        is_pair = targets is not NO_TARGETS
        parts = self._mesh.layout.dp * self._mesh.layout.cp * microbatches
        if self._local is None:
            batch = self._read(inputs, targets)
            self._agreement.note(batch.tensors, microbatches=microbatches, text=batch.text)
            counts = None
            sums = self._sums(batch, is_pair, parts)
        else:
            batch, counts, sums = self._local.receive(
                lambda: self._read(inputs, targets),
                lambda batch: self._sums(batch, is_pair, parts),
                is_empty=inputs is None and (targets is None or not is_pair),
                is_pair=is_pair,
                microbatches=microbatches,
            )
        part = divide_batch(
            batch,
            self._mesh,
            microbatches,
            is_pair=is_pair,
            counts=counts,
            keeps_sequences=self._call.keeps_sequences,
            needs_targets=self._loss.takes_batch,
        )
        self._loss.begin(parts=parts, weight=sums[0], elements=sums[1])
        return part

    def _read(self, inputs: Any, targets: Any) -> BatchTree:
        """Returns the batch; raises `ValueError` for one that the model cannot be called with."""
        if targets is not NO_TARGETS:
            return BatchTree.of_pair(inputs, targets)
        batch = BatchTree.of(inputs)
        self._call.check(batch.value, is_for_loss=self._loss.takes_batch)
        return batch

    def _sums(self, batch: BatchTree, is_pair: bool, parts: int) -> tuple[float, float]:
        """Returns the known weight of the targets of a batch, and about their number."""
        weight = self._loss.known_weight(batch, is_pair=is_pair, parts=parts)
        last = batch.tensors[-1 if is_pair else 0]
        counts = is_pair or not last.is_floating_point()
        return weight, float(last.numel() if counts else len(last))
