"""What runs the calls of one communicator, blocking or begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from unisono import config, native
from unisono.communicator.arrays import Staged
from unisono.communicator.calls import CallBook
from unisono.communicator.selection import default_selection
from unisono.communicator.work import CollectiveWork, Work
from unisono.runtime.native_executor import OP_CODES, NativeExecutor
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
        self._quick = native.QuickCalls(group)
        self._quick.timeout_s = settings.timeout_s
        self.run_quick = self._quick.run
        """Runs a blocking call that looks like one that was checked before; False if none does."""
        self._inline_s = _INLINE_S if size <= native.usable_cores() else _INLINE_CROWDED_S
        self._under_way: set[Work] = set()
        self._crowd = 1

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
        work = CollectiveWork(self.group, job, keep, result, complete)
        if not job.done():
            self.keep(work)
        return work

    def remember_quick(
        self,
        op: Op,
        source: Staged,
        target: Staged,
        reduction: object,
        root: int,
        algorithm: str | None,
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

    def keep(self, work: Work) -> None:
        """Holds the arrays of a call until it has ended, even if the program drops its handle."""
        if len(self._under_way) >= self._crowd:
            # Step by step, and from a copy: other threads may be doing the same.
            for old in self._under_way.copy():
                if old.is_completed():
                    self._under_way.discard(old)
            self._crowd = 2 * len(self._under_way) + 1
        self._under_way.add(work)
