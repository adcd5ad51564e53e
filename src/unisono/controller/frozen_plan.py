"""The frozen plan as one rank follows it: buckets that fill, and run in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.communicator import dtype_of
from unisono.controller.fusion import Bucket
from unisono.controller.handle import Flight, Handle
from unisono.controller.request import Request
from unisono.controller.transfer import Array, Job, Transfer


class PlannedTensor:
    """One tensor of the plan, and its handle in the current pass."""

    __slots__ = ("bucket", "dtype", "handle", "operation", "reduction", "request", "root", "shape")

    def __init__(self, request: Request, bucket: PlannedBucket) -> None:
        self.request = request
        self.bucket = bucket
        self.handle: Handle | None = None
        self.shape = request.shape
        self.operation = request.operation
        self.reduction = request.op
        self.root = request.root
        self.dtype: object = None
        """The element type of the last array that fitted, as the array names it."""

    def fits(self, array: Array, operation: str, op: str, root: int) -> bool:
        """Whether a submission is the same as in earlier passes."""
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
    """The tensors of one bucket. `missing`: how many the current pass still lacks."""

    __slots__ = ("missing", "tensors")

    def __init__(self, bucket: Bucket) -> None:
        self.tensors = tuple(PlannedTensor(request, self) for request in bucket.requests)
        self.missing = len(self.tensors)

    def take(self) -> tuple[Handle, ...]:
        """Returns the handles of a full bucket, and begins the next pass."""
        handles = tuple(tensor.handle for tensor in self.tensors if tensor.handle is not None)
        for tensor in self.tensors:
            tensor.handle = None
        self.missing = len(self.tensors)
        return handles


class FrozenPlan:
    """Runs the buckets of a plan, pass after pass. Its caller holds the lock of the loop."""

    def __init__(
        self,
        epoch: int,
        buckets: Sequence[Bucket],
        transfer: Transfer,
        on_end: Callable[[Flight], None],
    ) -> None:
        self.epoch = epoch
        self.launched = 0
        """Number of buckets launched since the plan was made, void ones included."""
        self.stopped = False
        self._transfer = transfer
        self._on_end = on_end
        self._buckets = tuple(PlannedBucket(bucket) for bucket in buckets)
        self.tensors = {
            tensor.request.name: tensor for bucket in self._buckets for tensor in bucket.tensors
        }
        self.flights: dict[int, Flight] = {}
        """The last flight of each bucket that was launched."""

    def add(self, tensor: PlannedTensor, handle: Handle) -> None:
        """Adds a tensor to its bucket, and launches the buckets that are full, in order."""
        tensor.handle = handle
        tensor.bucket.missing -= 1
        while not self.stopped and self._next.missing == 0:
            self._launch(self._next.take())

    def lacking(self, name: str) -> str:
        """Returns the reason why the tensor `name` has not been launched."""
        for bucket in self._buckets[self.launched % len(self._buckets) :]:
            absent = [each.request.name for each in bucket.tensors if each.handle is None]
            if absent:
                return f"{name!r} waits for {absent[0]!r}, which this rank has not submitted"
        return f"{name!r} waits for a bucket before its own"

    def void_up_to(self, launched: int) -> None:
        """Launches void buckets until `launched` buckets were launched."""
        while self.launched < launched:
            self._launch(None)

    def unlaunched(self) -> list[Handle]:
        """Returns the handles that wait for their bucket, and takes them out of the plan."""
        waiting: list[Handle] = []
        for bucket in self._buckets:
            waiting += bucket.take()
        return waiting

    @property
    def _next(self) -> PlannedBucket:
        return self._buckets[self.launched % len(self._buckets)]

    def _launch(self, handles: tuple[Handle, ...] | None) -> None:
        index = self.launched % len(self._buckets)
        job = None if handles is None else job_of(handles, key=(self.epoch, index))
        pending = self._transfer.begin_voted(job)
        flight = Flight(handles or (), pending, on_end=self._on_end)
        for handle in flight.handles:
            handle.flight = flight
        self.flights[index] = flight
        self.launched += 1


def job_of(handles: Sequence[Handle], op: str | None = None, key: object = None) -> Job:
    """Returns the collective of tensors that travel together; `op` replaces their reduction."""
    request = handles[0].request
    return Job(
        operation=request.operation,
        arrays=tuple(handle.array for handle in handles),
        op=op or request.op,
        root=request.root,
        key=key,
    )
