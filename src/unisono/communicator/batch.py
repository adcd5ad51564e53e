"""Batches: calls that are recorded first and then begun together.

All calls are known before the first begins. So messages may be recorded in any order without
deadlock, and small all_reduces of one type and reduction are packed into one call. The choice of
packed calls depends only on arguments that must be equal on all ranks, so all ranks pack the same
calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from unisono import native
from unisono.communicator.arrays import Array
from unisono.communicator.batch_memory import BatchMemory
from unisono.communicator.call_cache import CallRequest
from unisono.communicator.engine import Call, DeferredResult, Engine, MessageCall
from unisono.communicator.work import JoinedWork, MessageWork, Work
from unisono.errors import AbortedError, UnisonoError, UnsupportedError
from unisono.types import Op

_MOST_PACKED_BYTES = 32 << 10  # packing larger arrays costs more time for copies than it saves


class BatchedWork(Work):
    """The handle of one call of a batch, for use after the block."""

    def __init__(self, name: str, finish: Callable[[], Any] | None = None) -> None:
        """`name` is the name of the call. If this call is packed with others, `finish` completes
        this call and returns its result.
        """
        super().__init__(self._outcome)
        self._name = name
        self._own_finish = finish
        self._bound: Work | None = None
        self._cancelled: UnisonoError | None = None

    def bind(self, work: Work) -> None:
        """Sets the `Work` of the call, after the call has begun."""
        self._bound = work

    def give_up(self, error: UnisonoError) -> None:
        """Cancels the call with this error, unless the call has begun."""
        if self._bound is None:
            self._cancelled = error

    def _call(self) -> str:
        return f"{self._name} in a batch"

    def _state(self) -> str:
        waits = self._bound is None and self._cancelled is None
        return "not begun" if waits else super()._state()

    def _begun(self) -> Work:
        if self._cancelled is not None:
            raise self._cancelled
        if self._bound is None:
            raise UnisonoError("this call is recorded in a batch: wait for it after the block")
        return self._bound

    def _outcome(self) -> Any:
        result = self._begun().wait()
        return result if self._own_finish is None else self._own_finish()

    def _wait_native(self, timeout_s: float | None) -> bool:
        return self._begun()._wait_native(timeout_s)

    def is_completed(self) -> bool:
        return self._cancelled is not None or (
            self._bound is not None and self._bound.is_completed()
        )

    def _poll(self) -> bool:
        return self._cancelled is not None or self._begun()._poll()

    def _cannot_complete(self) -> bool:
        return self._cancelled is None and self._begun()._cannot_complete()

    def _end_if_late(self, waited_s: float) -> None:
        self._begun()._end_if_late(waited_s)

    def exception(self) -> Exception | None:
        return self._cancelled or (None if self._bound is None else self._bound.exception())

    def cancel(self) -> bool:
        return self._begun().cancel()

    def source_rank(self) -> int:
        """Returns the source rank of a received message."""
        return self._message().source_rank()

    def tag(self) -> int:
        """Returns the tag of a received message."""
        return self._message().tag()

    def _message(self) -> native.Request | MessageWork:
        work = self._begun()
        if not isinstance(work, native.Request | MessageWork):
            raise UnsupportedError(
                "expected the work of one receive: other works have no source or tag"
            )
        return work


class _MessageExchange(NamedTuple):
    """The point-to-point messages of one method call."""

    messages: Sequence[MessageCall]
    result: Any
    handle: BatchedWork


class _Single(NamedTuple):
    """A collective that is not packed with others."""

    name: str
    call: Call
    handles: Sequence[BatchedWork]

    def ready(self, engine: Engine) -> Call:
        """Returns the recorded call."""
        return self.call


class _Pack:
    """Small all_reduces with the same element type and reduction, packed into one call."""

    def __init__(self, request: CallRequest) -> None:
        self.name = "all_reduce"
        self.handles: list[BatchedWork] = []
        self.native = native.Pack()
        self._request = request

    def ready(self, engine: Engine) -> Call:
        """Returns one call for all packed all_reduces."""
        pack, lengths = self.native, self.native.lengths()
        if len(lengths) == 1:
            where = pack.memory()
            return Call(engine.call_cache.call(self._request), where, where, None, pack)
        buffer = np.empty(sum(lengths), np.uint8)
        address = buffer.ctypes.data
        pack.gather(address)
        request = self._request._replace(lengths=(buffer.nbytes,), packed=lengths)
        # If each packed call ran alone, none would need float32 copies. The usual plan for the
        # packed length may need them, so use the plan of one packed call instead.
        if engine.call_cache.widens(request):
            small = engine.call_cache.choose(request.op, self._request.lengths[0])
            request = request._replace(algorithm=small.plan.name)
        where = [(address, buffer.nbytes)]
        call, keep = engine.call_cache.call(request), (buffer, pack)
        return Call(call, where, where, None, keep, complete=lambda: pack.scatter(address))


class Batch(JoinedWork):
    """A `with` block whose calls begin together at the end of the block. After the block, this
    object is the `Work` of all calls.
    """

    def __init__(self, engine: Engine, async_op: bool) -> None:
        super().__init__([], lambda: None)
        self._engine = engine
        self._async_op = async_op
        self._thread = 0
        self._exchanges: list[_MessageExchange] = []
        self._calls: list[_Single | _Pack] = []
        self._packs: dict[tuple[int, ...], _Pack] = {}
        self._copied: list[Array] = []
        """Arrays whose results come from copies in packs."""
        self._begun = False

    # ---- recording the block

    def __enter__(self) -> Batch:
        engine = self._engine
        if self._thread and engine.recorder is None:
            raise UnsupportedError("this batch was used before: call batch() again")
        engine.start_recording(self)
        self._thread = threading.get_ident()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.stop_recording()
        if error is not None:
            if self._calls and isinstance(error, Exception):
                self._engine.refuse("batch", error)  # other ranks may begin the batch and wait
            self._cancel(error)
            return
        try:
            with self._engine.reporting_refusals("batch"):
                self._require_no_overlap()
                # All checks run before any call begins.
                calls = [entry.ready(self._engine) for entry in self._calls]
            self._begin(calls)
        except BaseException as failure:
            self._cancel(failure)
            raise
        if not self._async_op:
            self.wait()

    def _begin(self, calls: Sequence[Call]) -> None:
        engine = self._engine
        works = engine.begin_messages(
            [message for exchange in self._exchanges for message in exchange.messages],
            in_background=self._async_op or bool(self._calls),
        )
        handles, rest = [], iter(works)
        for messages, result, handle in self._exchanges:
            own = [next(rest) for _ in messages]
            handle.bind(own[0] if len(own) == 1 else _joined(own, result))
            handles.append(handle)
        begun: list[Work] = []
        for entry, call in zip(self._calls, calls, strict=True):
            work = engine.begin(entry.name, call)
            begun.append(work)
            for handle in entry.handles:
                handle.bind(work)
                handles.append(handle)
        self.works, self._begun = [*begun, *handles], True

    def _require_no_overlap(self) -> None:
        """Raises `ValueError` if one call writes memory that another call uses."""
        memory = BatchMemory()
        for number, entry in enumerate(self._calls, 1):
            if isinstance(entry, _Single):
                memory.add_call(number, entry.call, self._engine.rank)
        first = len(self._calls) + 1
        for number, exchange in enumerate(self._exchanges, first):
            for message in exchange.messages:
                memory.add_message(number, message)
        for number, array in enumerate(self._copied, first + len(self._exchanges)):
            memory.add_copied(number, array)
        packs = [entry.native for entry in self._calls if isinstance(entry, _Pack)]
        if memory.is_shared(packs):
            raise ValueError(
                "two calls of the batch share memory that one of them writes, but calls of a batch "
                "run in no order: put them in two batches"
            )

    def _cancel(self, why: BaseException) -> None:
        error = AbortedError(f"the batch was cancelled on this rank by {type(why).__name__}: {why}")
        cancelled = BatchedWork("all")
        handles = [cancelled, *(exchange.handle for exchange in self._exchanges)]
        handles += [handle for entry in self._calls for handle in entry.handles]
        for handle in handles:
            handle.give_up(error)
        self.works, self._begun = [cancelled], True

    # ---- after the block

    def _call(self) -> str:
        packed = sum(
            len(entry.native.memory()) for entry in self._calls if isinstance(entry, _Pack)
        )
        single = sum(isinstance(entry, _Single) for entry in self._calls)
        return f"batch of {single + packed + len(self._exchanges)} calls"

    def _state(self) -> str:
        return super()._state() if self._begun else "not begun"

    def _require_begun(self) -> None:
        if not self._begun:
            raise UnisonoError(
                "the calls of a batch begin at the end of its block: wait after the block"
            )

    def _wait_native(self, timeout_s: float | None) -> bool:
        self._require_begun()
        return super()._wait_native(timeout_s)

    def is_completed(self) -> bool:
        return self._begun and super().is_completed()

    def _poll(self) -> bool:
        self._require_begun()
        return super()._poll()

    # ---- recording

    def is_recording_thread(self) -> bool:
        """Returns True if calls of this thread belong to the batch."""
        return threading.get_ident() == self._thread

    def add_call(self, name: str, call: Call, async_op: bool) -> Any:
        """Records a collective."""
        if isinstance(call.result, DeferredResult) and not async_op:
            raise UnsupportedError(
                "inside a batch, a call whose result depends on the counts of other ranks needs "
                "these counts as an argument, or async_op=True"
            )
        pack = self._pack_for(call.request)
        if pack is None:
            handle = BatchedWork(name)
            self._calls.append(_Single(name, call, [handle]))
        else:
            handle = BatchedWork(name, call.finish)
            pack.native.add(*call.outputs[0], call)
            if call.complete is not None:
                self._copied.append(call.result)
            pack.handles.append(handle)
        return handle if async_op else call.result

    def _pack_for(self, request: CallRequest | None) -> _Pack | None:
        """Returns the pack for an all_reduce that is small enough, else None."""
        if (
            request is None
            or request.op is not Op.ALL_REDUCE
            or request.algorithm is not None
            or request.lengths[0] > _MOST_PACKED_BYTES
        ):
            return None
        key: tuple[int, ...] = (request.dtype, request.reduction)
        if request.caller_dtype is not None:
            key += (request.caller_dtype,)
        found = self._packs.get(key)
        if found is None:
            found = self._packs[key] = _Pack(request)
            self._calls.append(found)
            if request.caller_dtype is None:
                self._engine.pack_into(request, _MOST_PACKED_BYTES, found.native)
        return found

    def add_messages(self, messages: Sequence[MessageCall], result: Any, async_op: bool) -> Any:
        """Records sends and receives."""
        handle = BatchedWork(" and ".join(map(str, messages)))
        self._exchanges.append(_MessageExchange(messages, result, handle))
        return handle if async_op else result


def _joined(works: Sequence[Work], result: Any) -> JoinedWork:
    return JoinedWork(works, lambda: result)
