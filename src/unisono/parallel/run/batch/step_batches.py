"""This rank's part of the batch of each step.

With `batch="global"`, all ranks have the whole batch. With `"local"`, each rank of `dp` has a part
of its own. The ranks with one index along `dp`, which `tp`, `pp` and `cp` divide, share a part: one
of them passes it; the others pass the same, or None.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import distributed as dist

from unisono.parallel.run.batch.batch_parts import BatchPart, data_parallel_rank, divide_batch
from unisono.parallel.run.batch.batch_tree import BatchTree, replace_leaves
from unisono.parallel.run.batch.model_call import ModelCall
from unisono.parallel.run.loss.batch_loss import BatchLoss
from unisono.parallel.run.step.step_agreement import StepAgreement, batch_fingerprint, small_sum
from unisono.parallel.training_mesh import TrainingMesh

_NOTHING, _FAILED, _GIVEN = range(3)
_STATES = 2
"""Numbers of each rank in the exchange of a group: what it has, and the fingerprint of its part."""


class _Slot:
    """The place of a tensor in a message without tensors. No dataclass, which a batch may have."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


class LocalBatches:
    """Gives all ranks that share a part of a batch this part, and tells all ranks the sizes."""

    def __init__(self, mesh: TrainingMesh, agreement: StepAgreement) -> None:
        """Makes a group of the ranks that share a part. Collective."""
        self._mesh, self._agreement = mesh, agreement
        self._ranks, self._group = mesh.make_sample_group()

    def receive(
        self,
        read: Callable[[], BatchTree],
        sums: Callable[[BatchTree], tuple[float, float]],
        *,
        is_empty: bool,
        is_pair: bool,
        microbatches: int,
    ) -> tuple[BatchTree, Sequence[int], tuple[float, float]]:
        """Returns this rank's part, the samples of each rank of `dp`, and the sums over them.
        Collective.

        `read`: returns the part that this rank passed; `is_empty`: it passed none. `sums`: returns
        numbers of a part that are to be added. Raises an error on all ranks if one rank has one.
        """
        batch, found = None, (0.0, 0.0)
        try:
            batch = None if is_empty else read()
        except Exception as error:
            self._agreement.error = error
        try:
            batch = self._shared(batch, is_pair)
            if batch is not None:
                found = sums(batch)
        except ValueError as error:
            self._agreement.error = self._agreement.error or error
        text = "local pair" if is_pair else "local"
        self._agreement.note((), microbatches=microbatches, text=text)
        counts, sizes, found = self._of_all(batch, found)
        self._agreement.require(counts)
        assert batch is not None  # otherwise a rank has an error
        return batch, sizes, found

    def _of_all(
        self, batch: BatchTree | None, sums: tuple[float, float]
    ) -> tuple[list[float], list[int], tuple[float, float]]:
        """Returns the sums over all ranks of what they know. Collective."""
        sizes = [0.0] * self._mesh.layout.dp
        adds = self._mesh.rank == self._ranks[0]
        if adds and batch is not None:
            sizes[data_parallel_rank(self._mesh)] = float(batch.samples)
        own = self._agreement.counts()
        numbers = [*own, *sizes, *(each * adds for each in sums)]
        found = small_sum(numbers, self._mesh.all_ranks)
        counts, rest = found[: len(own)], found[len(own) :]
        if not counts[0] and not any(rest[:-2]):
            self._agreement.error = ValueError(
                "a batch needs at least one sample, got parts without samples on all ranks"
            )
            counts[0] = float(dist.get_world_size())
        return counts, [int(each) for each in rest[:-2]], (rest[-2], rest[-1])

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
        if self._mesh.rank == source:
            assert batch is not None
            for each in batch.tensors:
                self._send(each.detach().contiguous(), source)
            return batch

        def filled(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, _Slot):
                return leaf
            memory = torch.empty(leaf.shape, dtype=leaf.dtype)
            self._send(memory, source)
            return memory

        value = replace_leaves(pickle.loads(message[0]), filled)
        return BatchTree.of_pair(*value) if is_pair else BatchTree.of(value)

    def _send(self, tensor: torch.Tensor, source: int) -> None:
        if tensor.numel():
            memory = tensor.reshape(-1).view(torch.uint8)
            dist.broadcast(memory, src=source, group=self._group)


def _message(value: Any) -> bytes | str:
    """Returns a batch without its tensors, or the reason why no message can carry it."""

    def slot(_: str, leaf: Any) -> Any:
        return _Slot(leaf) if isinstance(leaf, torch.Tensor) else leaf

    try:
        return pickle.dumps(replace_leaves(value, slot))
    except Exception as error:
        text = " ".join(str(error).split())
        return (
            f"batch: another rank of tp, pp or cp needs this part, but no message can carry it "
            f"({text}); pass the same part on all ranks with one data_parallel_rank"
        )


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
