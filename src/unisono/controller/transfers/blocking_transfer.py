"""Transfers over libraries with blocking collectives. A thread runs the jobs one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from unisono.controller.transfers.transfer import Array, Job, RemadeJob, VotedJob
from unisono.errors import AbortedError, CommunicationError, UnisonoError, UnsupportedError

_AVERAGES = ("avg", "average")

Outcome = tuple[bool, Any, int, int]
"""True if all ranks were ready; the result; the times at which the job began and ended, in ns."""


class BlockingCollectives(Protocol):
    """Collectives of one group of ranks on contiguous arrays. Each method returns when its
    collective has ended.
    """

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, flat: Array, op: str) -> None:
        """Reduces `flat` over all ranks, in place. `op` is never an average."""

    def broadcast(self, flat: Array, root: int) -> None:
        """Copies `flat` of `root` into `flat` of all ranks."""

    def all_gather(self, array: Array, lengths: Sequence[int]) -> Array:
        """Returns the concatenated arrays of all ranks. Rank r has `lengths[r]` rows."""

    def reduce_scatter(self, array: Array, op: str) -> Array:
        """Returns this rank's share of the rows of the reduced array."""

    def all_to_all(self, array: Array) -> Array:
        """Returns the concatenated shares of rows that all ranks send to this rank."""

    def close(self) -> None:
        """Releases the group."""


class BlockingTransfer:
    """A `Transfer` over two groups of the same ranks, one for decided jobs (all ranks are known to
    be ready) and one for voted jobs (the ranks first vote whether all are ready).

    Every error of a library is raised as `CommunicationError`.
    """

    def __init__(self, decided: BlockingCollectives, voted: BlockingCollectives) -> None:
        """Takes both groups; `close` closes them."""
        self._decided = decided
        self._voted = voted
        self._decided_thread = ThreadPoolExecutor(1, "unisono-decided-jobs")
        self._voted_thread = ThreadPoolExecutor(1, "unisono-voted-jobs")

    def begin(self, job: Job) -> PendingJob:
        """Begins a job for which all ranks are ready."""

        def run() -> tuple[bool, Any]:
            return True, _run(self._decided, job)

        return _submit(self._decided_thread, run)

    def prepare(self, job: Job) -> VotedJob:
        """Prepares a voted job. The ranks vote by an all_reduce of one number."""
        return RemadeJob(self._begin_voted, job)

    def _begin_voted(self, job: Job | None) -> PendingJob:
        def run() -> tuple[bool, Any]:
            votes = np.array([job is not None], np.int64)
            self._voted.all_reduce(votes, "min")
            if job is None or not votes[0]:
                return False, None
            return True, _run(self._voted, job)

        return _submit(self._voted_thread, run)

    def close(self) -> None:
        """Ends both threads after their current jobs, and releases the groups."""
        for thread, group in (
            (self._decided_thread, self._decided),
            (self._voted_thread, self._voted),
        ):
            thread.shutdown(wait=False, cancel_futures=True)
            group.close()


class PendingJob:
    """A job in the queue of a thread."""

    def __init__(self, future: Future[Outcome]) -> None:
        self._future = future

    def wait(self, timeout_s: float | None = None) -> Any:
        """Waits for the job and returns its result. Raises `TimeoutError` or the job's error."""
        try:
            return self._future.result(timeout_s)[1]
        except CancelledError:
            raise AbortedError("the transfer was closed before this job began") from None

    def is_completed(self) -> bool:
        """Returns True if the job has completed or failed."""
        return self._future.done()

    @property
    def ran(self) -> bool:
        """True if all ranks were ready. Valid after the job has ended."""
        return self._future.result()[0]

    def times_ns(self) -> tuple[int, int] | None:
        """Returns the `time.monotonic_ns` at which the thread began and ended the job."""
        return self._future.result()[2:] if self._future.done() else None


def _submit(thread: ThreadPoolExecutor, run: Callable[[], tuple[bool, Any]]) -> PendingJob:
    def reporting() -> Outcome:
        begun_ns = time.monotonic_ns()
        try:
            return *run(), begun_ns, time.monotonic_ns()
        except UnisonoError:
            raise
        except Exception as error:  # each library has its own exceptions
            raise CommunicationError(f"the transfer failed: {error}") from error

    try:
        return PendingJob(thread.submit(reporting))
    except RuntimeError as error:  # `close` has shut the thread down
        raise AbortedError(f"the transfer is closed: {error}") from error


def _run(group: BlockingCollectives, job: Job) -> Any:
    first = job.arrays[0]
    if job.operation == "all_gather":
        rows = tuple(first.shape[:1]) or (1,)
        return group.all_gather(_contiguous(first), job.lengths or rows * group.size)
    if job.operation == "all_to_all":
        return group.all_to_all(_contiguous(first))
    op, divisor = ("sum", group.size) if job.op in _AVERAGES else (job.op, 1)
    if divisor > 1 and not _is_inexact(first):
        raise UnsupportedError(f"avg of {first.dtype}: this transfer averages floats only")
    if job.operation == "reduce_scatter":
        share = group.reduce_scatter(_contiguous(first), op)
        if divisor > 1:
            share /= divisor
        return share
    flat = _joined(job.arrays)
    if job.operation == "broadcast":
        group.broadcast(flat, job.root)
    elif job.operation == "all_reduce":
        group.all_reduce(flat, op)
        if divisor > 1:
            flat /= divisor
    else:
        raise UnsupportedError(f"no such collective: {job.operation!r}")
    _copy_back(flat, job.arrays)
    return None


def _joined(arrays: Sequence[Array]) -> Array:
    """Returns a flat copy of the arrays' elements, one array after another."""
    parts = [array.reshape(-1) for array in arrays]
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import torch

    return torch.cat(parts)


def _copy_back(flat: Array, arrays: Sequence[Array]) -> None:
    start = 0
    for array in arrays:
        count = int(np.prod(array.shape))
        array[...] = flat[start : start + count].reshape(array.shape)
        start += count


def _contiguous(array: Array) -> Array:
    return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array.contiguous()


def _is_inexact(array: Array) -> bool:
    if isinstance(array, np.ndarray):
        return bool(np.issubdtype(array.dtype, np.inexact))
    return bool(array.is_floating_point() or array.is_complex())
