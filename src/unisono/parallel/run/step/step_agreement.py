"""The check that all ranks are in the same step, with the same batch and without an error."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import distributed as dist

from unisono import native
from unisono.parallel.run.rank_agreement import of_all_ranks
from unisono.torch_backend import communicator_of

_COMPARED_BYTES = 2**17  # read from memory in about 10 us


def batch_fingerprint(batch: Sequence[torch.Tensor], turn: int = 0, text: str = "") -> int:
    """Returns 32 bits from the shapes, types and bytes of tensors, equal for equal bytes.

    `text`: whatever else is to be equal.
    Of a tensor above 128 KiB, takes a part of about this size, which depends on `turn`, so that the
    time stays far below that of a forward pass. Of n times this size, calls with n successive
    turns take all. Values that are NaN do not matter, since bytes are compared.
    """
    found = zlib.crc32(
        repr([(each.shape, each.dtype) for each in batch]).encode(), zlib.crc32(text.encode())
    )
    for each in batch:
        if each.layout == torch.strided:
            plain = _plain(each)
            step = -(-plain.nbytes // _COMPARED_BYTES) or 1
            found = native.hash_memory(plain.data_ptr(), plain.nbytes, found, turn % step, step)
    return found % 2**32


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose values are its bytes in CPU memory, in order."""
    if x.is_cpu and x.is_contiguous() and not (x.is_conj() or x.is_neg()):
        return x  # the operations below would take longer than the hash
    return x.detach().cpu().resolve_conj().resolve_neg().contiguous()


def small_sum(numbers: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
    """Returns the sums of each rank's numbers over a group. Collective. Without a group, this rank
    is alone.

    Calls the communicator of a group of the backend unisono, since the calls that
    `torch.distributed` makes around it take longer than so small a sum.
    """
    shared = np.array(numbers, dtype=np.float64)
    communicator = communicator_of(group)
    if communicator is not None:
        communicator.all_reduce(shared)
    elif group is not None:
        dist.all_reduce(torch.from_numpy(shared), group=group)
    found: list[float] = shared.tolist()
    return found


_BITS = 16
_LIMIT = 2**_BITS


class StepAgreement:
    """What each rank knows about its step, compared in the exchange of the loss.

    An exception that one rank catches leaves it a step ahead of the others, and a data loader may
    give each rank another batch. Then all ranks raise an error before the weights change.
    """

    def __init__(self) -> None:
        self._ranks = dist.get_world_size()
        self.begun = 0
        """Number of steps that this rank has begun."""
        self._fingerprint = 0
        self._shapes: tuple[tuple[int, ...], ...] = ()
        self._microbatches = 0
        self.error: Exception | None = None
        """An error of this rank, after which it still took part in the collectives of the step."""
        self._agreed: Exception | None = None

    def has_raised(self, error: BaseException) -> bool:
        """Returns True if `require` has raised this error, so that all ranks have one. Forgets the
        error: its traceback holds the memory of the step."""
        agreed, self._agreed = self._agreed, None
        return agreed is error

    def is_agreed(self, error: BaseException) -> bool:
        """Returns True if `require` has raised this error, so that all ranks have one."""
        return self._agreed is error

    def begin(self) -> None:
        """Begins a step."""
        self.begun += 1
        self.error, self._shapes, self._fingerprint, self._microbatches = None, (), 0, 0

    def note(self, batch: Sequence[torch.Tensor], *, microbatches: int, text: str = "") -> None:
        """Notes what all ranks must have in common: the tensors of the whole batch that the program
        gave to this rank, the number of microbatches, and any text."""
        self._microbatches = microbatches
        common = f"{text}{microbatches}"
        self._fingerprint = batch_fingerprint(batch, turn=self.begun, text=common)
        self._shapes = tuple(tuple(each.shape) for each in batch)

    def counts(self) -> list[float]:
        """Returns the values of this rank, which are to be added over all ranks."""
        found = [float(self.error is not None)]
        for each in (self.begun % _LIMIT, self._fingerprint % _LIMIT, self._fingerprint // _LIMIT):
            found += [each, each**2]
        return found

    def exchange(self, groups: Sequence[dist.ProcessGroup | None]) -> None:
        """Adds the counts of all ranks, and raises an error as `require` does. Collective.

        `groups`: those of the axes of the layout, each over other ranks. The passes use the same
        groups, so a rank that still waits in the passes of an earlier step learns that this rank
        has left them.
        """
        counts = self.counts()
        for group in filter(None, groups):
            counts = small_sum(counts, group)
        self.require(counts)

    def require(self, counts: Sequence[float]) -> None:
        """Raises an error on all ranks if they disagree or if one of them had an error. Collective.

        `counts`: the sum of `counts()` over all ranks.
        """
        errors, *sums = map(int, counts)
        pairs = zip(sums[::2], sums[1::2], strict=True)
        # the mean of squares is the square of the mean only if all ranks have one number
        if errors == 0 and all(self._ranks * squares == total**2 for total, squares in pairs):
            return
        error, self.error = self.error, None  # its traceback holds the memory of the step
        mine = None if error is None else (line_of(error), type(error) is ValueError)
        own = (mine, self.begun, self._microbatches, self._fingerprint, self._shapes)
        found: list[_Known] = of_all_ranks(own)
        reason = _disagreement(found)
        if reason is None and error is not None:
            self._agreed = error
            raise error
        self._agreed = _first_error(found) if reason is None else ValueError(reason)
        raise self._agreed from error


_Known = tuple[tuple[str, bool] | None, int, int, int, tuple[tuple[int, ...], ...]]
"""What a rank knows: the text of its error and whether it is a refusal, the numbers of its step and
of its microbatches, and the fingerprint and shapes of its batch."""


def line_of(error: BaseException) -> str:
    """Returns an error in one line; with its type, unless it is a refusal."""
    text = " ".join(str(error).split())
    return text if type(error) is ValueError else f"{type(error).__name__}: {text}"


def _first_error(found: Sequence[_Known]) -> Exception:
    """Returns the error of the lowest rank that has one, as a refusal if it is a refusal there."""
    errors = ((rank, error) for rank, (error, *_) in enumerate(found))
    rank, text, is_refusal = next((rank, *error) for rank, error in errors if error is not None)
    kind = ValueError if is_refusal else RuntimeError
    return kind(f"rank {rank} could not take this step, so no rank changed its weights: {text}")


def _disagreement(found: Sequence[_Known]) -> str | None:
    """Returns how the ranks differ; None if they are in one step with one batch."""
    _, begun, microbatches, *batch = found[0]
    for rank, (_, other, *_) in enumerate(found):
        if other != begun:
            return (
                f"rank 0 is in its step number {begun} and rank {rank} in its step number {other}, "
                "so they would train on different batches; an exception that only one rank caught "
                "ended its step: start all ranks again from a checkpoint"
            )
    for rank, (_, _, count, *other_batch) in enumerate(found):
        (_, shapes), (_, theirs) = batch, other_batch
        if microbatches != count and microbatches and count:
            return (
                f"rank 0 divides the batch into {microbatches} microbatches and rank {rank} into "
                f"{count}; pass the same number on every rank"
            )
        if shapes and theirs and other_batch != batch:
            sizes = f", with shapes {shapes} and {theirs}" if shapes != theirs else ""
            return (
                f"ranks 0 and {rank} passed different batches to step{sizes}; pass the same whole "
                "batch on every rank: each rank takes its part of the batch itself (a sampler that "
                "divides samples over the ranks is not needed)"
            )
    return None
