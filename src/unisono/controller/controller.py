"""The controller: collectives on named tensors, which each rank submits in its own order."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType

from unisono.communicator import Communicator
from unisono.controller.channel import Channel
from unisono.controller.fusion.buckets import DEFAULT_FUSION_BYTES
from unisono.controller.fusion.fusion_report import FusionReport
from unisono.controller.fusion.fusion_tuner import FusionTuner
from unisono.controller.handle import Handle
from unisono.controller.loop import Loop
from unisono.controller.messages import Stalled
from unisono.controller.transfers.communicator_transfer import CommunicatorTransfer, duplicate
from unisono.controller.transfers.recorded_transfer import recorded
from unisono.controller.transfers.transfer import Array, Transfer
from unisono.timeline import TimelineWriter, clock_identity, compare_clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStats:
    """Counts on this rank since the controller was created."""

    tensors_submitted: int
    collectives_run: int
    cache_hits: int
    """Number of submitted tensors that were part of a frozen plan, so that the ranks exchanged no
    message about them."""
    bytes: int
    """Bytes of all submitted tensors."""
    plan_changes: int
    """Number of times that the ranks adopted or left a frozen plan."""
    wait_s: float
    """Total seconds in which handles waited until all ranks had submitted their tensors."""


class Controller:
    """Runs collectives on named tensors, which each rank may submit in its own order.

    A tensor runs when all ranks have submitted it. Tensors that are ready together share a message,
    up to `fusion_bytes`. Once the steps of a program repeat, the ranks agree on a plan. After that,
    agreement costs one reduction of 8 bytes for each message, and no thread wakes up. If a step
    differs, the ranks negotiate again until they agree on a new plan.

    With `tune_fusion`, the controller tunes the buckets of tensors while steps repeat. It measures
    when tensors are ready and how long messages take, and computes the buckets that finish first.
    It compares the new buckets with the buckets of `fusion_bytes`, and keeps the new buckets if a
    statistical test shows that they are faster (`FusionTuner`). This takes at most 133 steps.
    `fusion_report` returns the result.

    If the ranks disagree about a tensor, the tensor fails on all ranks with `MismatchError`. The
    message has both values and the ranks that have them. The controller stays usable. A tensor that
    waits for a rank longer than `stall_warning_s` seconds is logged on all ranks. A lost rank fails
    the controller.

    All ranks of `comm` must create the controller. It has its own communicators, so the program may
    use `comm` at the same time.

    >>> import numpy as np, unisono
    >>> with unisono.init(rank=0, size=1, rendezvous="example of a controller") as comm:
    ...     with Controller(comm) as controller:
    ...         handle = controller.all_reduce("layer1.weight", np.ones(3))
    ...         result = handle.wait()
    >>> result.tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        fusion_bytes: int | None = None,
        tune_fusion: bool | None = None,
        stall_warning_s: float = 10.0,
        transfer: Transfer | None = None,
    ) -> None:
        """`tune_fusion`: True to search for better buckets. All ranks use rank 0's value. None
        means True if neither `fusion_bytes` nor `transfer` is given. Other buckets round sums of
        three or more ranks differently, except on a `reproducible` communicator.

        `transfer` moves the data. None: new communicators of the same ranks.
        """
        if fusion_bytes is not None and fusion_bytes < 0:
            raise ValueError(f"fusion_bytes: expected 0 or more bytes, got {fusion_bytes}")
        if not stall_warning_s > 0:
            raise ValueError(f"stall_warning_s: expected seconds above 0, got {stall_warning_s}")
        self.rank = comm.rank
        self.size = comm.size
        self.timeline = comm.timeline
        """The record of this rank's last events."""
        if tune_fusion is None:
            tune_fusion = fusion_bytes is None and transfer is None
        channel = Channel(_compared(duplicate(comm), self.timeline))
        if transfer is None:
            transfer = CommunicatorTransfer.over(comm)
        self._loop = Loop(
            channel,
            recorded(transfer, self.timeline),
            fusion_bytes=DEFAULT_FUSION_BYTES if fusion_bytes is None else fusion_bytes,
            stall_warning_s=stall_warning_s,
            timeout_s=comm.timeout_s,
            timeline=self.timeline,
            tuner=_tuner(comm, tune_fusion),
        )
        # Also closes the controller when the interpreter exits, so that the other ranks are
        # informed.
        self._finalizer = weakref.finalize(self, self._loop.close)

    def __repr__(self) -> str:
        return f"Controller(rank={self.rank}, size={self.size})"

    def all_reduce(self, name: str, x: Array, op: str = "sum", *, priority: int = 0) -> Handle:
        """Reduces `x` over all ranks, in place, once all ranks have submitted `name`.

        `op` may be any reduction of `Communicator.all_reduce` except functions and `premul_sum`. Of
        tensors that are ready at the same time, the one with the highest `priority` runs first.

        Raises `ValueError` if the previous tensor of this name has not ended. Every method that
        submits a tensor raises `TypeError` or `ValueError` at once for wrong arguments.
        """
        handle: Handle | None = self._loop.submit_planned(name, x, op)
        if handle is not None:
            return handle
        return self._loop.submit(name, x, "all_reduce", op, -1, priority)

    def broadcast(self, name: str, x: Array, root: int = 0) -> Handle:
        """Copies the root's `x` into `x` of all ranks."""
        return self._loop.submit(name, x, "broadcast", "sum", root, 0)

    def all_gather(self, name: str, x: Array) -> Handle:
        """Gathers `x` of all ranks; `wait` returns a new array, with the ranks in order.

        The arrays may differ in the length of their first dimension.
        """
        return self._loop.submit(name, x, "all_gather", "sum", -1, 0)

    def reduce_scatter(self, name: str, x: Array, op: str = "sum") -> Handle:
        """Reduces `x` over all ranks; `wait` returns this rank's share as a new array."""
        return self._loop.submit(name, x, "reduce_scatter", op, -1, 0)

    def all_to_all(self, name: str, x: Array) -> Handle:
        """Sends share d of `x` to rank d. `wait` returns the shares that all ranks sent to this
        rank.
        """
        return self._loop.submit(name, x, "all_to_all", "sum", -1, 0)

    def group(self, names: Sequence[str]) -> None:
        """Declares that these tensors always run together. All ranks declare the same groups."""
        self._loop.group(names)

    def join(self, *, average_over: str = "active", timeout_s: float | None = None) -> int:
        """Waits until all ranks have joined, and returns the last rank that joined.

        A rank with less data than the others calls this at its end. While it waits, it contributes
        values that do not change results. `average_over`: averages divide by the number of ranks
        that have the tensor ("active"), or by the size of the group ("all"). The value of the first
        rank that joins counts.
        """
        if average_over not in ("active", "all"):
            raise ValueError(f"average_over: expected 'active' or 'all', got {average_over!r}")
        return self._loop.join(average_over == "all", timeout_s)

    def stats(self) -> ControllerStats:
        """Returns the counts of this rank since the controller was created."""
        return ControllerStats(**asdict(self._loop.counters))

    def fusion_report(self) -> FusionReport | None:
        """Returns the most recent decision on the tensors that share a message (`tune_fusion`), or
        None before the first decision.
        """
        return self._loop.fusion_report

    def stalls(self) -> tuple[Stalled, ...]:
        """Returns the tensors that wait, each with the ranks that have submitted it, the ranks that
        have not, and the waiting time.
        """
        return self._loop.ask_stalls()

    def close(self) -> None:
        """Closes the controller. Tensors that still wait fail on all ranks. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Controller:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._loop.fail_all_ranks(error)
        self.close()


def _compared(comm: Communicator, timeline: TimelineWriter) -> Communicator:
    """Compares the clocks of the hosts, if there are several, and notes the result in the timeline.
    Collective. Returns `comm`.
    """
    if len(comm.hosts) > 1:
        reading = compare_clocks(comm, time.monotonic_ns, clock_identity())
        if reading is not None:
            timeline.note_clock(reading)
    return comm


def _tuner(comm: Communicator, tunes: bool) -> FusionTuner | None:
    if not tunes or comm.size == 1:
        return None
    return FusionTuner(seed=random.SystemRandom().getrandbits(64))
