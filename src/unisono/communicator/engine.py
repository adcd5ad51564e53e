"""The engine of one communicator: runs its calls, blocking or asynchronous."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unisono import config, native
from unisono.bootstrap import GroupNetwork, TransportKind, single_copy_for
from unisono.communicator.arrays import Array, Staged
from unisono.communicator.call_cache import CallCache, CallRequest
from unisono.communicator.work import CollectiveWork, JoinedWork, MessageWork, PendingCalls
from unisono.errors import CommunicationError, MismatchError, UnisonoError, UnsupportedError
from unisono.execution import OP_CODES, NativeExecutor
from unisono.schedule import Schedule
from unisono.selection import SelectionTable
from unisono.types import Op, SingleCopy

Memory: TypeAlias = list[tuple[int, int]]
"""Address and length in bytes of each piece."""

PreparedCall: TypeAlias = tuple[native.Prepared, Memory, Memory]
"""A prepared call with its inputs and outputs."""

# Seconds that an asynchronous call waits for its peers in the caller's thread, at most. If the
# peers arrive within this time, the call avoids the hand-over to the progress thread, which would
# take about as long as this wait. With more ranks than cores the second, longer limit applies: a
# rank that waits leaves its core to late peers.
_INLINE_S = 100e-6
_INLINE_OVERSUBSCRIBED_S = 10e-3


class DeferredResult:
    """A result that exists only after the call has begun."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = None


class LaterUse(NamedTuple):
    """The program's arrays that the second call of `Call.then` reads and writes."""

    reads: Sequence[Array]
    writes: Sequence[Array]

    @classmethod
    def of(cls, read: Array | Sequence[Array] | None, written: Any) -> LaterUse:
        """Returns the use of arrays or lists of arrays; None and `DeferredResult` are none."""
        return cls(arrays_of(read), arrays_of(written))


def arrays_of(arrays: Any) -> Sequence[Array]:
    """Returns the arrays of an argument or a result, which may be one array or several."""
    if arrays is None or isinstance(arrays, DeferredResult):
        return ()
    return arrays if isinstance(arrays, list | tuple) else (arrays,)


class Call(NamedTuple):
    """A collective call that is ready to run.

    `keep` refers to the call's memory, so that the memory stays alive until the call has ended.
    `complete` then copies the result to the caller's array. `then`, if not None, makes a second
    call that runs directly after this one, with the arrays of `later`.
    """

    prepared: native.Prepared
    inputs: Memory
    outputs: Memory
    result: Any
    keep: object
    request: CallRequest | None = None
    complete: Callable[[], None] | None = None
    then: Callable[[], PreparedCall] | None = None
    later: LaterUse | None = None

    def finish(self) -> Any:
        """Returns the result after the call has ended. If the call used a copy of the caller's
        array, first copies the result to that array. Must run only once per call.
        """
        if self.complete is not None:
            self.complete()
        return self.result.value if isinstance(self.result, DeferredResult) else self.result


class MessageCall(NamedTuple):
    """A send or a receive with its memory."""

    sends: bool
    staged: Staged
    peer: int
    tag: int
    result: Array | None = None

    def __str__(self) -> str:
        tag = "" if not self.tag else f" with tag {self.tag}"
        if self.tag == native.ANY_TAG:
            tag = " with any tag"
        if self.sends:
            return f"send to rank {self.peer}{tag}"
        return f"recv from {'any rank' if self.peer < 0 else f'rank {self.peer}'}{tag}"

    def finish(self) -> Any:
        """Returns the result after the message has ended. If a message was received into a copy of
        the caller's array, first copies the message to that array. Must run only once per message.
        """
        if not self.sends:
            self.staged.restore()
        return self.result


class CallRecorder(Protocol):
    """Records the calls of a batch."""

    def is_recording_thread(self) -> bool:
        """Returns True if calls of this thread belong to the batch."""

    def add_call(self, name: str, call: Call, async_op: bool) -> Any:
        """Records a collective. Returns the value that the communicator's method returns."""

    def add_messages(self, messages: Sequence[MessageCall], result: Any, async_op: bool) -> Any:
        """Records sends and receives. Returns the value that the communicator's method returns."""


class Engine:
    """The native group of one rank, with its prepared calls."""

    def __init__(
        self,
        group: native.Group,
        rank: int,
        size: int,
        settings: config.Settings,
        table: SelectionTable,
        network: GroupNetwork | None = None,
        *,
        single_copy: SingleCopy = SingleCopy.NEVER,
    ) -> None:
        """`network` is the group's network if its ranks are on several hosts. `single_copy` is
        NEVER if some rank cannot read another rank's memory.
        """
        self.group = group
        self.network = network
        hosts = network.hosts if network else None
        reach = (
            functools.partial(network.reach, transport=TransportKind.COLLECTIVES)
            if network
            else None
        )
        self.rank = rank
        self.size = size
        single_copy_rules = single_copy_for(size, cores=table.cores, wanted=single_copy)
        executor = NativeExecutor(
            group, rank, settings.stores, hosts, reach, single_copy_rules, cores=table.cores
        )
        self._new_call_cache = functools.partial(
            CallCache, executor, size, hosts=hosts, reproducible=settings.reproducible
        )
        self.call_cache = self._new_call_cache(table)
        self._inline_s = _INLINE_S if size <= native.usable_cores() else _INLINE_OVERSUBSCRIBED_S
        self._pending_calls = PendingCalls(group)
        # FastPath must not refer to this engine: the garbage collector cannot detect a reference
        # cycle through C++.
        self._quick = native.FastPath(
            group,
            self._pending_calls.make,
            self._pending_calls.held,
            self._pending_calls.prune,
            self._inline_s,
        )
        self.messages = native.Messages(group, settings.single_copy is not SingleCopy.NEVER)
        self.windows: dict[native.Window, object] = {}  # with the memory that each needs
        self.timeout_s = settings.timeout_s
        self.quick = self._quick.run
        """Runs or begins a call whose arguments match an earlier, checked call. Returns the result
        or the `Work`; None if no earlier call matches. In a batch, records calls that can be
        packed.
        """
        self.recorder: CallRecorder | None = None

    @property
    def timeout_s(self) -> float:
        """Seconds after which a call fails."""
        return self._quick.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._quick.timeout_s = self.messages.timeout_s = timeout_s

    @property
    def recording(self) -> bool:
        """True if calls of this thread belong to a batch."""
        return self.recorder is not None and self.recorder.is_recording_thread()

    def start_recording(self, recorder: CallRecorder) -> None:
        """Makes the following calls of this thread part of a batch."""
        if self.recorder is not None:
            raise UnsupportedError(
                "a batch is already open on this communicator: end it before the next"
            )
        self.recorder = recorder
        self.messages.recording = True
        self._quick.start_recording()

    def stop_recording(self) -> None:
        """Ends the recording: later calls of this thread run at once."""
        self.recorder = None
        self.messages.recording = False
        self._quick.stop_recording()

    def pack_into(self, request: CallRequest, most_bytes: int, pack: native.Pack) -> None:
        """Lets the fast path `quick` add all_reduces of at most `most_bytes` to `pack`, if they
        have the type and reduction of `request`.
        """
        self._quick.pack_into(request.dtype, request.reduction, most_bytes, pack)

    def collective(self, name: str, async_op: bool, make: Callable[..., Call], *args: Any) -> Any:
        """Runs the call that `make(engine, *args)` returns, or begins it and returns a `Work`.

        If `make` raises, reports the error to the other ranks; see `refuse`.
        """
        with self.reporting_refusals(name):
            async_op = bool(async_op)  # raises if `async_op` has no truth value
            call = make(self, *args)
            if self.recorder is not None and self.recorder.is_recording_thread():
                return self.recorder.add_call(name, call, async_op)
        if async_op:
            return self.begin(name, call)
        self.group.run_pieces(call.prepared, call.inputs, call.outputs, self.timeout_s, call.then)
        return call.finish()

    @contextmanager
    def reporting_refusals(self, name: str) -> Iterator[None]:
        """Reports an error inside the block to the other ranks as a refusal of the collective
        `name`.
        """
        try:
            yield
        except CommunicationError:
            raise  # all ranks raise this error, so it needs no report
        except Exception as error:
            self.refuse(name, error)
            raise

    def refuse(self, name: str, error: Exception) -> None:
        """Tells the other ranks that this rank refused its next collective call because of `error`.

        Often only one rank sees wrong arguments, for example because its last batch is smaller.
        Without this message the other ranks would wait until the timeout.

        The refused call keeps its position in the order of calls. If all ranks refuse it, they stay
        in step and the group stays usable. A rank that makes the call raises `MismatchError` with
        this reason. Each error is reported once.
        """
        if getattr(error, "was_reported", False):
            return
        error.was_reported = True  # type: ignore[attr-defined]
        with suppress(CommunicationError):
            reason = str(error).removeprefix(f"{name}: ")
            self.group.refuse(f"{name}: {type(error).__name__}: {reason}")

    def begin(self, name: str, call: Call) -> CollectiveWork:
        """Begins the call of the method `name`."""
        work = self._pending_calls.make(name, call, None, call.finish)
        return self._start(
            work,
            lambda: self.group.submit_pieces(
                call.prepared, call.inputs, call.outputs, self.timeout_s, self._inline_s, call.then
            ),
        )

    def begin_voted(
        self,
        name: str,
        vote: native.Prepared,
        votes: NDArray[np.int64],
        call: Call | None,
        finish: Callable[[], Any] | None,
    ) -> CollectiveWork:
        """Begins a voted call: reduces `votes`, one number of each rank, and then runs `call` if
        the result is not 0.

        `finish` is called once after the end, and returns the result.
        """
        work = self._pending_calls.make(name, (call, votes), None, finish)
        prepared, inputs, outputs = (None, [], []) if call is None else call[:3]
        return self._start(
            work,
            lambda: self.group.submit_voted(
                vote, votes.ctypes.data, prepared, inputs, outputs, self.timeout_s, self._inline_s
            ),
        )

    def voted_all_reduce(
        self,
        vote: native.Prepared | native.CarriedVote,
        call: native.Prepared,
        lengths: Sequence[int],
        begin_copied: Callable[[native.VotedAllReduce, tuple[Any, ...]], Any],
    ) -> native.VotedAllReduce:
        """Prepares the all_reduce `call` of arrays of `lengths` bytes, which runs if all ranks vote
        yes. `begin_copied` begins the all_reduce for arrays that must be copied first.
        """
        pending = self._pending_calls
        return native.VotedAllReduce(
            self.group,
            vote,
            call,
            lengths,
            begin_copied,
            pending.held,
            pending.prune,
            self.timeout_s,
            self._inline_s,
        )

    def release_ended(self) -> None:
        """Releases the arrays of the calls that have ended, also of those without a `wait`."""
        self._pending_calls.release_ended()

    def _start(self, work: CollectiveWork, submit: Callable[[], native.Job]) -> CollectiveWork:
        self._pending_calls.keep(work)
        try:
            work.job = submit()
        # This error means that the call has not begun, so its arrays can be released. An error of a
        # signal handler comes only after the begin.
        except UnisonoError:
            self._pending_calls.release(work)
            raise
        if work.is_completed():
            self._pending_calls.release(work)
        return work

    def exchange_messages(
        self, messages: Sequence[MessageCall], result: Any, async_op: bool
    ) -> Any:
        """Sends and receives messages in any order. Returns `result`; if `async_op`, returns a
        `Work`.
        """
        if self.recorder is not None and self.recorder.is_recording_thread():
            return self.recorder.add_messages(messages, result, async_op)
        if not messages:
            self.group.require_healthy()
        works = self.begin_messages(messages, in_background=async_op)
        work = works[0] if len(works) == 1 else JoinedWork(works, lambda: result)
        if async_op:
            return work
        work.wait()
        return result

    def adopt_table(self, table: SelectionTable) -> None:
        """Uses another selection table from now on."""
        if table != self.call_cache.table:
            self.call_cache = self._new_call_cache(table)

    def begin_messages(
        self, messages: Sequence[MessageCall], *, in_background: bool
    ) -> list[native.Request | MessageWork]:
        """Begins all receives and then all sends, so that arriving messages need no intermediate
        storage.

        With `in_background` the messages progress while the program does other work.
        """
        requests = [self.request(message) for message in messages]
        for sends in (False, True):
            for message, request in zip(messages, requests, strict=True):
                if message.sends is sends:
                    self.messages.begin(request, in_background)
        return [
            request
            if message.sends or message.staged.copy is None
            else MessageWork(request, message.finish)
            for message, request in zip(messages, requests, strict=True)
        ]

    def request(self, message: MessageCall, *, persistent: bool = False) -> native.Request:
        """Makes a point-to-point request that has not begun."""
        self.reach(message.peer)
        staged = message.staged
        memory = staged.array if staged.copy is None else staged.copy
        starter = self.messages.begin if persistent else None
        return self.messages.request(
            message.sends, *staged.located, message.peer, message.tag, memory, starter
        )

    def reach(self, peer: int) -> None:
        """Starts connecting this rank to `peer`, or to all ranks for ANY_SOURCE."""
        if self.network is None:
            return
        peers = range(self.size) if peer == native.ANY_SOURCE else [peer]
        self.network.reach(peers, TransportKind.P2P)
        for rank in peers:
            self.messages.reach(rank)

    def disagree(self, text: str) -> NoReturn:
        """Aborts the group with `MismatchError` on all ranks."""
        self.group.fail_mismatch(text)
        raise MismatchError(text)

    def refuse_in_batch(self, what: str) -> None:
        """Raises `UnsupportedError` if this thread has an open batch."""
        if self.recording:
            raise UnsupportedError(f"{what} is not possible inside a batch")

    def remember_quick(
        self,
        op: Op,
        source: Staged,
        target: Staged,
        reduction: object,
        root: int,
        algorithm: str | Schedule | None,
        call: native.Prepared,
    ) -> None:
        """Lets the next call with equal arguments skip all checks. Does nothing if an array was
        copied.
        """
        if source.copy is not None or target.copy is not None:
            return
        self._quick.learn(
            OP_CODES[op],
            source.located,
            target.located,
            reduction,
            root,
            algorithm,
            call,
        )
