"""The controller: collectives by name, in any order on each rank."""

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
from unisono.controller.transfers.recorded_transfer import RecordedTransfer
from unisono.controller.transfers.transfer import Array, Transfer
from unisono.timeline import TimelineWriter, clock_identity, compare_clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerStats:
    """Counts since the controller was made, on this rank."""

    tensors_submitted: int
    collectives_run: int
    cache_hits: int
    """Tensors that the frozen plan had: the ranks exchanged no message about them."""
    bytes: int
    """Sum of the submitted tensors' sizes."""
    plan_changes: int
    """Number of times that the ranks froze a plan, or left one."""
    wait_s: float
    """Seconds for which handles waited until all ranks had their tensor."""


class Controller:
    """Runs collectives on named tensors, which each rank may submit in an order of its own.

    A tensor runs when all ranks have submitted it. Tensors that are ready together share a message,
    up to `fusion_bytes`. Once the steps of a program repeat, the ranks agree on a plan. After that,
    agreement costs one reduction of 8 bytes for each message, and no thread wakes up. A step that
    differs returns the ranks to talking; then they agree on a new plan.

    With `tune_fusion`, it tunes its fusion while steps repeat. It measures when tensors are ready
    and how long messages take, computes the buckets that finish first, and compares them in turns
    with those of `fusion_bytes`. It keeps them if they are certainly faster; see `FusionTuner`.
    This takes at most 133 steps. `fusion_report` returns the result.

    If the ranks disagree about a tensor, it fails on all ranks with `MismatchError`, which has both
    values and the ranks that hold them; the controller stays usable. A tensor that waits for a rank
    longer than `stall_warning_s` seconds is logged on all ranks. A lost rank fails the controller.

    Collective over the ranks of `comm`. The controller has communicators of its own, so the program
    may use `comm` meanwhile.

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
        """`tune_fusion`: finds better buckets than those of `fusion_bytes`; rank 0 decides. None:
        True if neither `fusion_bytes` nor `transfer` is given. Other buckets round sums of three
        or more ranks differently, except on a `reproducible` communicator.

        `transfer`: what moves the data; None: communicators of these ranks.
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
            RecordedTransfer(transfer, self.timeline),
            fusion_bytes=DEFAULT_FUSION_BYTES if fusion_bytes is None else fusion_bytes,
            stall_warning_s=stall_warning_s,
            timeout_s=comm.timeout_s,
            timeline=self.timeline,
            tuner=_tuner(comm, tune_fusion),
        )
        # Also at the end of the interpreter, so that the other ranks are told.
        self._finalizer = weakref.finalize(self, self._loop.close)

    def __repr__(self) -> str:
        return f"Controller(rank={self.rank}, size={self.size})"

    def all_reduce(self, name: str, x: Array, op: str = "sum", *, priority: int = 0) -> Handle:
        """Reduces `x` over all ranks, in place, once all ranks have submitted `name`.

        `op` as for `Communicator.all_reduce`, but for functions and `premul_sum`. Of tensors that
        are ready at the same time, the one with the highest `priority` runs first.

        Raises `ValueError` if the last tensor of this name has not ended.
        """
        handle: Handle | None = self._loop.submit_planned(name, x, op)
        if handle is not None:
            return handle
        return self._loop.submit(name, x, "all_reduce", op, -1, priority)

    def broadcast(self, name: str, x: Array, root: int = 0) -> Handle:
        """Copies `x` of `root` into `x` of all ranks."""
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
        """Sends share d of `x` to rank d; `wait` returns the shares of all ranks."""
        return self._loop.submit(name, x, "all_to_all", "sum", -1, 0)

    def group(self, names: Sequence[str]) -> None:
        """Declares that these tensors always run together. All ranks declare the same groups."""
        self._loop.group(names)

    def join(self, *, average_over: str = "active", timeout_s: float | None = None) -> int:
        """Waits until all ranks have joined; returns the last. For ranks that have less data.

        Until then this rank contributes values that change no result. `average_over`: averages
        divide by the number of ranks that have the tensor ("active"), or by the size of the group
        ("all"); the value of the first rank that joins counts.
        """
        if average_over not in ("active", "all"):
            raise ValueError(f"average_over: expected 'active' or 'all', got {average_over!r}")
        return self._loop.join(average_over == "all", timeout_s)

    def stats(self) -> ControllerStats:
        """Returns what this rank has counted so far."""
        return ControllerStats(**asdict(self._loop.counters))

    def fusion_report(self) -> FusionReport | None:
        """Returns what the tuning of fusion decided last. None: nothing so far, or it is off."""
        return self._loop.fusion_report

    def stalls(self) -> tuple[Stalled, ...]:
        """Returns the tensors that wait: which ranks have them, which do not, for how long."""
        return self._loop.ask_stalls()

    def close(self) -> None:
        """Leaves. Tensors that still wait fail, here and on other ranks. Idempotent."""
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
    """Compares the clocks of the hosts, if there are several. Collective. Returns `comm`."""
    if len(comm.hosts) > 1:
        reading = compare_clocks(comm, time.monotonic_ns, clock_identity())
        if reading is not None:
            timeline.note_clock(reading)
    return comm


def _tuner(comm: Communicator, tunes: bool) -> FusionTuner | None:
    if not tunes or comm.size == 1:
        return None
    return FusionTuner(seed=random.SystemRandom().getrandbits(64))
