"""One rank's frozen plan: buckets that fill with tensors and run in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono import native
from unisono.communicator import dtype_of
from unisono.controller.fusion.buckets import Bucket
from unisono.controller.handle import IN_PLACE, Flight, Handle
from unisono.controller.request import Request
from unisono.controller.transfers.transfer import Array, Job, PendingVote, Transfer, VotedJob


class PlannedTensor:
    """One tensor of the plan, and its handle in the current pass (one repetition of the plan)."""

    __slots__ = (
        "bucket", "dtype", "handle", "nbytes", "operation", "reduction", "request", "root", "shape"
    )  # fmt: skip

    bucket: PlannedBucket

    def __init__(self, request: Request) -> None:
        self.request = request
        self.handle: Handle | None = None
        self.nbytes = request.nbytes
        self.shape = request.shape
        self.operation = request.operation
        self.reduction = request.op
        self.root = request.root
        self.dtype: object = None
        """The `dtype` object of the last array that fitted."""

    def fits(self, array: Array, operation: str, op: str, root: int) -> bool:
        """Returns True if a submission has the shape, type and arguments of this tensor in the
        plan.
        """
        return bool(
            array.shape == self.shape
            and op == self.reduction
            and operation == self.operation
            and root == self.root
            and (array.dtype is self.dtype or self._fits_dtype(array))
        )

    def _fits_dtype(self, array: Array) -> bool:
        if dtype_of(array) is not self.request.dtype:
            return False
        self.dtype = array.dtype
        return True


class PlannedBucket:
    """The tensors of one bucket, which share a message. `missing` is the number of these tensors
    that the program has not yet submitted in the current pass.
    """

    __slots__ = ("flight", "in_place", "job", "missing", "tensors")

    def __init__(self, tensors: tuple[PlannedTensor, ...]) -> None:
        self.tensors = tensors
        self.missing = len(tensors)
        self.in_place = tensors[0].operation in IN_PLACE
        for tensor in tensors:
            tensor.bucket = self
        self.job: VotedJob | None = None
        """The job of this bucket, which the first launch prepares."""
        self.flight: Flight | None = None
        """The most recent flight (collective in progress) of this bucket."""

    def take(self) -> list[Handle]:
        """Returns the handles of the current pass, and empties the bucket for the next pass."""
        handles = [each.handle for each in self.tensors if each.handle is not None]
        _CURRENT.fill(self.tensors, None)
        self.missing = len(self.tensors)
        return handles

    def take_full(self) -> tuple[tuple[Handle, ...], tuple[Array, ...]]:
        """Returns the handles of a full bucket and their arrays, and empties the bucket."""
        tensors = self.tensors
        self.missing = len(tensors)
        if len(tensors) == 1 and (handle := tensors[0].handle) is not None:
            tensors[0].handle = None  # in less time than a call of the native core
            return (handle,), (handle.array,)
        return _CURRENT.take(tensors, _ARRAY)


# Slots of tensors and handles. One call reads or writes the slots of a whole bucket.
_CURRENT = native.SlotColumn(PlannedTensor, "handle")
_ARRAY = native.SlotColumn(Handle, "array")
_FLIGHT = native.SlotColumn(Handle, "flight")


class FrozenPlan:
    """Runs the buckets of a plan, pass after pass. The caller must hold the loop's lock."""

    def __init__(
        self,
        epoch: int,
        buckets: Sequence[Bucket],
        transfer: Transfer,
        on_end: Callable[[Flight], None],
        stand_in: Callable[[Sequence[Request]], Job],
    ) -> None:
        """`stand_in` returns a job for requests whose arrays this rank does not have."""
        self.epoch = epoch
        self.launched = 0
        """Number of buckets launched since the plan was made, including void ones (for which this
        rank was not ready)."""
        self._place = 0
        """Index of the bucket to launch next."""
        self.stopped = False
        self._transfer = transfer
        self._on_end = on_end
        self._stand_in = stand_in
        self._buckets = tuple(
            PlannedBucket(tuple(map(PlannedTensor, bucket.requests))) for bucket in buckets
        )
        self.tensors = {
            tensor.request.name: tensor for bucket in self._buckets for tensor in bucket.tensors
        }

    @property
    def flights(self) -> list[Flight]:
        """The most recent flight (collective in progress) of each bucket that was launched."""
        return [bucket.flight for bucket in self._buckets if bucket.flight is not None]

    @property
    def has_waiting(self) -> bool:
        """True if tensors wait for other tensors of their bucket or for other ranks."""
        return any(tensor.handle is not None for tensor in self.tensors.values()) or not all(
            flight.has_ended() for flight in self.flights
        )

    def add(self, tensor: PlannedTensor, handle: Handle) -> None:
        """Adds a tensor to its bucket, and launches the buckets that are full, in order."""
        tensor.handle = handle
        bucket = tensor.bucket
        bucket.missing -= 1
        if bucket.missing == 0:
            self.launch_full()

    def lacking(self, name: str) -> str:
        """Returns the reason why the tensor `name` has not been launched."""
        for bucket in self._buckets[self._place :]:
            absent = [each.request.name for each in bucket.tensors if each.handle is None]
            if absent:
                return f"{name!r} waits for {absent[0]!r}, which this rank has not submitted"
        return f"{name!r} waits for a bucket before its own"

    def void_up_to(self, launched: int) -> None:
        """Launches void buckets, which run on no rank, until the plan has launched `launched`
        buckets.
        """
        while self.launched < launched:
            bucket = self._buckets[self._place]
            if bucket.flight is not None:
                bucket.flight.settle(None)  # the runs of a job share its memory
            if bucket.job is None:
                requests = [each.request for each in bucket.tensors]
                bucket.job = self._transfer.prepare(self._stand_in(requests))
            self._launch(bucket, (), bucket.job.begin_void())

    def unlaunched(self) -> list[Handle]:
        """Returns the handles that wait for their bucket, and removes them from the plan."""
        waiting: list[Handle] = []
        for bucket in self._buckets:
            waiting += bucket.take()
        return waiting

    def launch_full(self) -> None:
        """Launches the buckets that are full, in order."""
        while not self.stopped:
            bucket = self._buckets[self._place]
            if bucket.missing > 0:
                return
            handles, arrays = bucket.take_full()
            if bucket.job is None:
                bucket.job = self._transfer.prepare(job_of(handles))
            self._launch(bucket, handles, bucket.job.begin(arrays))

    def _launch(
        self, bucket: PlannedBucket, handles: tuple[Handle, ...], pending: PendingVote
    ) -> None:
        flight = bucket.flight = Flight(handles, pending, self._on_end, bucket.in_place)
        if len(handles) == 1:
            handles[0].flight = flight
        else:
            _FLIGHT.fill(handles, flight)
        self.launched += 1
        self._place = (self._place + 1) % len(self._buckets)


def job_of(handles: Sequence[Handle], op: str | None = None) -> Job:
    """Returns the job (one collective) that carries these tensors in one message. `op`, if given,
    replaces the reduction that the tensors were submitted with.
    """
    request = handles[0].request
    return Job(
        operation=request.operation,
        arrays=tuple(handle.array for handle in handles),
        op=op or request.op,
        root=request.root,
        names=tuple(handle.request.name for handle in handles),
    )
