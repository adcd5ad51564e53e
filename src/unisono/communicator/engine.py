"""What runs the calls of one communicator, blocking or begun."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

from unisono import config, native
from unisono.bootstrap import GroupNetwork, TransportKind, single_copy_for
from unisono.communicator.arrays import Array, Staged
from unisono.communicator.calls import CallCache, CallRequest
from unisono.communicator.work import CollectiveWork, JoinedWork, MessageWork, UnderWay
from unisono.errors import CommunicationError, MismatchError, UnisonoError, UnsupportedError
from unisono.execution import OP_CODES, NativeExecutor
from unisono.schedule import Schedule
from unisono.selection import SelectionTable
from unisono.types import Op, SingleCopy

Memory: TypeAlias = list[tuple[int, int]]
"""Address and bytes of each piece."""

Ready: TypeAlias = tuple[native.Prepared, Memory, Memory]
"""A call with its inputs and outputs."""

# How long an asynchronous call may wait for its peers in the caller's thread. Peers that are about
# to arrive spare the hand-over to the progress thread, which costs about as much. With more ranks
# than cores, waiting here gives the core to the very peers that are waited for: no other thread
# of this rank could use it better.
_INLINE_S = 100e-6
_INLINE_CROWDED_S = 10e-3


class Later:
    """A result that does not exist before the call is under way."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = None


class Call(NamedTuple):
    """A collective call that lacks nothing.

    `keep` holds its memory until it has ended; `complete` then brings the result where the caller
    expects it. `then`, where there is one, makes the call that must follow at once.
    """

    prepared: native.Prepared
    inputs: Memory
    outputs: Memory
    result: Any
    keep: object
    request: CallRequest | None = None
    complete: Callable[[], None] | None = None
    then: Callable[[], Ready] | None = None

    def finish(self) -> Any:
        """To be called once after the end; returns the result."""
        if self.complete is not None:
            self.complete()
        return self.result.value if isinstance(self.result, Later) else self.result


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
        """To be called once after the end; returns the result."""
        if not self.sends:
            self.staged.restore()
        return self.result


class CallRecorder(Protocol):
    """Takes the calls of a batch."""

    def takes(self) -> bool:
        """Whether calls of this thread belong to the batch."""

    def add_call(self, name: str, call: Call, async_op: bool) -> Any:
        """Records a collective; returns what its method does."""

    def add_messages(self, messages: Sequence[MessageCall], result: Any, async_op: bool) -> Any:
        """Records sends and receives; returns what their method does."""


class Engine:
    """The native group of one rank with the calls that were prepared for it."""

    def __init__(
        self,
        group: native.Group,
        rank: int,
        size: int,
        settings: config.Settings,
        table: SelectionTable,
        span: GroupNetwork | None = None,
        *,
        single_copy: SingleCopy = SingleCopy.NEVER,
    ) -> None:
        """`span`: what the group has of the network, where its ranks are on several hosts.
        `single_copy`: whether its ranks are to read each other's memory, and can."""
        self.group = group
        self.span = span
        hosts = span.hosts if span else None
        reach = functools.partial(span.reach, transport=TransportKind.COLLECTIVES) if span else None
        self.rank = rank
        self.size = size
        lending = single_copy_for(size, cores=table.cores, wanted=single_copy)
        executor = NativeExecutor(group, rank, settings.stores, hosts, reach, lending)
        self._new_book = functools.partial(
            CallCache, executor, size, hosts=hosts, reproducible=settings.reproducible
        )
        self.book = self._new_book(table)
        self._inline_s = _INLINE_S if size <= native.usable_cores() else _INLINE_CROWDED_S
        self._under_way = UnderWay(group)
        # Without a reference to this engine: C++ holds it, where no collector finds a cycle.
        self._quick = native.QuickCalls(
            group,
            self._under_way.make,
            self._under_way.held,
            self._under_way.prune,
            self._inline_s,
        )
        self.messages = native.Messages(group, settings.single_copy is not SingleCopy.NEVER)
        self.timeout_s = settings.timeout_s
        self.quick = self._quick.run
        """Runs or begins a call that looks like one that was checked before; its result or its
        work, None if there was no such call. In a batch it records what can be packed."""
        self.recorder: CallRecorder | None = None

    @property
    def timeout_s(self) -> float:
        """Seconds after which a call gives up."""
        return self._quick.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._quick.timeout_s = self.messages.timeout_s = timeout_s

    @property
    def recording(self) -> bool:
        """Whether calls of this thread belong to a batch."""
        return self.recorder is not None and self.recorder.takes()

    def start_recording(self, recorder: CallRecorder) -> None:
        """From here on, the calls of this thread belong to a batch."""
        if self.recorder is not None:
            raise UnsupportedError("a batch is open already: batches do not nest")
        self.recorder = recorder
        self.messages.recording = True
        self._quick.start_recording()

    def stop_recording(self) -> None:
        """Calls run again."""
        self.recorder = None
        self.messages.recording = False
        self._quick.stop_recording()

    def pack_into(self, request: CallRequest, most_bytes: int, pack: native.Pack) -> None:
        """Lets `quick` record calls such as this one."""
        self._quick.pack_into(request.dtype, request.reduction, most_bytes, pack)

    def collective(self, name: str, async_op: bool, make: Callable[..., Call], *args: Any) -> Any:
        """Runs the call that `make(engine, *args)` returns, or begins it and returns a `Work`.

        Where it raises instead, the other ranks are told: see `refuse`.
        """
        with self.telling_refusals(name):
            async_op = bool(async_op)  # raises for what is neither true nor false
            call = make(self, *args)
            if self.recorder is not None and self.recorder.takes():
                return self.recorder.add_call(name, call, async_op)
        if async_op:
            return self.begin(name, call)
        self.group.run_pieces(call.prepared, call.inputs, call.outputs, self.timeout_s, call.then)
        return call.finish()

    @contextmanager
    def telling_refusals(self, name: str) -> Iterator[None]:
        """What goes wrong inside, before this rank makes its part of the collective `name`, is told
        to the other ranks."""
        try:
            yield
        except CommunicationError:
            raise  # which all ranks get anyway
        except Exception as error:
            self.refuse(name, error)
            raise

    def refuse(self, name: str, error: Exception) -> None:
        """Tells the ranks that make a call which this rank refused with `error`.

        Wrong arguments are often seen by one rank alone: its last batch is smaller, or it is the
        root. The others would wait for it until the timeout. The refused call takes its place among
        the calls of this rank. So ranks that refuse it alike stay in step, and no harm was done; a
        rank that makes it raises `MismatchError` with this reason. Told once for each error.
        """
        if getattr(error, "was_told", False):
            return
        error.was_told = True  # type: ignore[attr-defined]
        with suppress(CommunicationError):
            reason = str(error).removeprefix(f"{name}: ")
            self.group.refuse(f"{name}: {type(error).__name__}: {reason}")

    def begin(self, name: str, call: Call) -> CollectiveWork:
        """Begins the call of the method `name`."""
        work = self._under_way.make(name, call, None, call.finish)
        self._under_way.keep(work)
        try:
            work.job = self.group.submit_pieces(
                call.prepared, call.inputs, call.outputs, self.timeout_s, self._inline_s, call.then
            )
        except UnisonoError:  # it did not begin; what a signal handler raises may come later
            self._under_way.let_go(work)
            raise
        if work.is_completed():
            self._under_way.let_go(work)
        return work

    def deliver(self, messages: Sequence[MessageCall], result: Any, async_op: bool) -> Any:
        """Exchanges messages in any order; returns `result`, or a `Work` that will."""
        if self.recorder is not None and self.recorder.takes():
            return self.recorder.add_messages(messages, result, async_op)
        if not messages:
            self.group.require_healthy()
        works = self.post(messages, carried=async_op)
        work = works[0] if len(works) == 1 else JoinedWork(works, lambda: result)
        if async_op:
            return work
        work.wait()
        return result

    def adopt_table(self, table: SelectionTable) -> None:
        """Chooses by another table from here."""
        if table != self.book.table:
            self.book = self._new_book(table)

    def post(
        self, messages: Sequence[MessageCall], *, carried: bool
    ) -> list[native.Request | MessageWork]:
        """Begins messages, the receives first, so that what comes need not be stored. `carried`: if
        the program does something else meanwhile, they go on."""
        requests = [self.request(message) for message in messages]
        for sends in (False, True):
            for message, request in zip(messages, requests, strict=True):
                if message.sends is sends:
                    self.messages.begin(request, carried)
        return [
            request
            if message.sends or message.staged.copy is None
            else MessageWork(request, message.finish)
            for message, request in zip(messages, requests, strict=True)
        ]

    def request(self, message: MessageCall, *, persistent: bool = False) -> native.Request:
        """A request that has not begun."""
        self.reach(message.peer)
        staged = message.staged
        memory = staged.array if staged.copy is None else staged.copy
        starter = self.messages.begin if persistent else None
        return self.messages.request(
            message.sends, *staged.located, message.peer, message.tag, memory, starter
        )

    def reach(self, peer: int) -> None:
        """Sees to it that this rank is, or soon will be, connected to a rank, or to all."""
        if self.span is None:
            return
        peers = range(self.size) if peer == native.ANY_SOURCE else [peer]
        self.span.reach(peers, TransportKind.P2P)
        for rank in peers:
            self.messages.reach(rank)

    def disagree(self, text: str) -> NoReturn:
        """Ends the group with `MismatchError` on all ranks."""
        self.group.fail_mismatch(text)
        raise MismatchError(text)

    def refuse_in_batch(self, what: str) -> None:
        """Raises `UnsupportedError` if a batch of this thread is open."""
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
        """Lets the next such call skip all checks; only where nothing was copied."""
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
