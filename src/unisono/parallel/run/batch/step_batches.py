"""This rank's part of the batch of each step.

With `batch="global"`, all ranks have the whole batch. With `"local"`, each rank of `dp` has a part
of its own. The ranks with one index along `dp`, which `tp`, `pp` and `cp` divide, share a part: one
of them passes it; the others pass the same, or None.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import distributed as dist

from unisono.parallel.run.batch.batch_parts import BatchPart, data_parallel_rank, divide_batch
from unisono.parallel.run.batch.batch_tree import BatchTree, Frame
from unisono.parallel.run.batch.model_call import ModelCall
from unisono.parallel.run.loss.batch_loss import BatchLoss
from unisono.parallel.run.step.step_agreement import StepAgreement, batch_fingerprint, small_sum
from unisono.parallel.training_mesh import TrainingMesh

_NOTHING, _FAILED, _GIVEN = range(3)
_STATES = 2
"""Numbers of each rank in the exchange of a group: what it has, and the fingerprint of its part."""


NO_TARGETS: Final = object()
"""In place of targets, if a step has one batch of any nesting."""


class StepBatches:
    """Reads the batch that the program passes to a step, and divides it."""

    def __init__(
        self,
        mesh: TrainingMesh,
        agreement: StepAgreement,
        call: ModelCall,
        loss: BatchLoss,
        *,
        is_local: bool,
    ) -> None:
        """Makes a group of the ranks that share a part. Collective with local batches."""
        self._mesh, self._agreement, self._call, self._loss = mesh, agreement, call, loss
        self._is_local = is_local
        self._ranks, self._group = mesh.make_sample_group() if is_local else ((), None)

    def divide(self, inputs: Any, targets: Any, microbatches: int) -> BatchPart:
        """Returns this rank's part, and prepares the loss for it. Collective with local batches.

        Raises `ValueError` for a batch that cannot be divided: with local batches on all ranks,
        unless the sizes do not fit the layout.
        """
        is_pair = targets is not NO_TARGETS
        parts = self._mesh.layout.dp * self._mesh.layout.cp * microbatches
        counts: Sequence[int] | None = None
        if self._is_local:
            batch, counts, sums = self._received(inputs, targets, microbatches, parts)
        else:
            batch = self._read(inputs, targets)
            self._agreement.note(batch.tensors, microbatches=microbatches, text=batch.text)
            sums = self._sums(batch, is_pair, parts)
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

    def _received(
        self, inputs: Any, targets: Any, microbatches: int, parts: int
    ) -> tuple[BatchTree, Sequence[int], tuple[float, float]]:
        """Returns the part of this rank's group, the samples of each rank of `dp`, and `_sums` over
        them. Collective. Raises an error on all ranks if one rank has one."""
        batch, found, is_pair = None, (0.0, 0.0), targets is not NO_TARGETS
        is_empty = inputs is None and (targets is None or not is_pair)
        try:
            batch = None if is_empty else self._read(inputs, targets)
        except Exception as error:
            self._agreement.error = error
        try:
            batch = self._shared(batch, is_pair)
            if batch is not None:
                found = self._sums(batch, is_pair, parts)
        except ValueError as error:
            self._agreement.error = self._agreement.error or error
        text = "local pair" if is_pair else "local"
        self._agreement.note((), microbatches=microbatches, text=text)
        sizes = [0.0] * self._mesh.layout.dp
        adds = self._mesh.rank == self._ranks[0]
        if adds and batch is not None:
            sizes[data_parallel_rank(self._mesh)] = float(batch.samples)
        own = self._agreement.counts()
        numbers = [*own, *sizes, *(each * adds for each in found)]
        shared = small_sum(numbers, self._mesh.all_ranks)
        agreed, sizes, found = shared[: len(own)], shared[len(own) : -2], (shared[-2], shared[-1])
        if not agreed[0] and not any(sizes):
            self._agreement.error = ValueError(
                "a batch needs at least one sample, got parts without samples on all ranks"
            )
            agreed[0] = float(dist.get_world_size())
        self._agreement.require(agreed)
        assert batch is not None  # otherwise a rank has an error
        return batch, [int(each) for each in sizes], found

    def _shared(self, batch: BatchTree | None, is_pair: bool) -> BatchTree | None:
        """Returns the part of this rank's group; None if a rank of it has an error. Collective.

        Raises `ValueError` if no rank of the group has a part, or if two have different ones.
        """
        states = self._states(batch)
        kinds = [kind for kind, _ in states]
        if _FAILED in kinds:
            return None
        if _GIVEN not in kinds:
            raise ValueError(
                f"{self._names(self._ranks)} passed no part of the batch; one of the ranks with one"
                " data_parallel_rank passes its part to step, the others may pass None"
            )
        first = kinds.index(_GIVEN)
        for place, state in enumerate(states):
            if state[0] == _GIVEN and state != states[first]:
                raise ValueError(
                    f"{self._names([self._ranks[first], self._ranks[place]])} have one "
                    "data_parallel_rank, but passed different parts of the batch; pass the same "
                    "part, or None on all but one"
                )
        if kinds.count(_GIVEN) == len(kinds):
            return batch
        return self._broadcast(batch, self._ranks[first], is_pair)

    def _names(self, ranks: Sequence[int]) -> str:
        numbers = ", ".join(map(str, ranks))
        return f"ranks {numbers}" if len(ranks) > 1 else f"rank {numbers}"

    def _states(self, batch: BatchTree | None) -> list[tuple[int, int]]:
        """Returns what each rank of the group has, and its fingerprint. Collective."""
        kind = _NOTHING if batch is None else _GIVEN
        if self._agreement.error is not None:
            kind = _FAILED
        mark = 0
        if kind == _GIVEN and batch is not None and self._group is not None:
            mark = batch_fingerprint(batch.tensors, turn=self._agreement.begun, text=batch.text)
        numbers = [0.0] * (_STATES * len(self._ranks))
        place = _STATES * self._ranks.index(self._mesh.rank)
        numbers[place : place + _STATES] = float(kind), float(mark)
        found = [int(each) for each in small_sum(numbers, self._group)]
        return list(zip(found[::_STATES], found[1::_STATES], strict=True))

    def _broadcast(self, batch: BatchTree | None, source: int, is_pair: bool) -> BatchTree:
        """Returns the part of a rank on all ranks of the group. Collective."""
        message: list[Any] = [None]
        if self._mesh.rank == source:
            assert batch is not None
            message = [_message(batch.value)]
        dist.broadcast_object_list(message, src=source, group=self._group)
        if isinstance(message[0], str):
            raise ValueError(message[0])
        own = batch if self._mesh.rank == source else None
        if own is not None:
            tensors = [each.detach().contiguous() for each in own.tensors]
        else:
            frame, forms = pickle.loads(message[0])
            tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in forms]
        for each in tensors:
            if each.numel():
                memory = each.reshape(-1).view(torch.uint8)
                dist.broadcast(memory, src=source, group=self._group)
        if own is not None:
            return own
        value = frame.filled(tensors)
        return BatchTree.of_pair(*value) if is_pair else BatchTree.of(value)


def _message(value: Any) -> bytes | str:
    """Returns a batch without its tensors, or the reason why no message can carry it."""

    try:
        frame, tensors = Frame.of(value)
        return pickle.dumps((frame, [(tuple(each.shape), each.dtype) for each in tensors]))
    except Exception as error:
        text = " ".join(str(error).split())
        return (
            f"batch: another rank of tp, pp or cp needs this part, but no message can carry it "
            f"({text}); pass the same part on all ranks with one data_parallel_rank"
        )
