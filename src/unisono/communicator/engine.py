"""What runs the calls of one communicator, blocking or begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from unisono import config, native
from unisono.communicator.arrays import Staged
from unisono.communicator.calls import CallBook
from unisono.communicator.selection import default_selection
from unisono.communicator.work import UnderWay
from unisono.runtime.native_executor import OP_CODES, NativeExecutor
from unisono.schedule import Schedule
from unisono.types import Op

Memory: TypeAlias = list[tuple[int, int]]
"""Address and bytes of each piece."""

# How long an asynchronous call may wait for its peers in the caller's thread. Peers that are about
# to arrive spare the hand-over to the progress thread, which costs about as much. With more ranks
# than cores, waiting here gives the core to the very peers that are waited for: no other thread
# of this rank could use it better.
_INLINE_S = 100e-6
_INLINE_CROWDED_S = 10e-3


class Engine:
    """The native group of one rank with the calls that were prepared for it."""

    def __init__(
        self, group: native.Group, rank: int, size: int, settings: config.Settings
    ) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        executor = NativeExecutor(group, rank, settings.stores)
        self.book = CallBook(executor, size, default_selection(size))
        self._inline_s = _INLINE_S if size <= native.usable_cores() else _INLINE_CROWDED_S
        self._under_way = UnderWay(group)
        # Without a reference to this engine: C++ holds it, where no collector finds a cycle.
        self._quick = native.QuickCalls(group, self._under_way.begin, self._inline_s)
        self._quick.timeout_s = settings.timeout_s
        self.quick = self._quick.run
        """Runs or begins a call that looks like one that was checked before; its result or its
        work, None if there was no such call."""
        self.keep = self._under_way.keep

    @property
    def timeout_s(self) -> float:
        """Seconds after which a call gives up."""
        return self._quick.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._quick.timeout_s = timeout_s

    def run(
        self,
        call: native.Prepared,
        inputs: Memory,
        outputs: Memory,
        result: Any,
        *,
        keep: object,
        async_op: bool,
        complete: Callable[[], None] | None = None,
    ) -> Any:
        """Runs the call and returns `result`, or begins it and returns a `Work`.

        `keep` holds the memory until the call has ended; `complete` then brings the result where
        the caller expects it.
        """
        if not async_op:
            self.group.run_pieces(call, inputs, outputs, self.timeout_s)
            if complete is not None:
                complete()
            return result
        job = self.group.submit_pieces(call, inputs, outputs, self.timeout_s, self._inline_s)
        return self._under_way.begin(job, keep, result, complete)

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
            source.array,
        )
