"""The process group: barrier, coalescing, name, timeout, split, shrink and shutdown.

The collectives are in `reducing_collectives.py` and `data_movement.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from unisono.errors import CollectiveTimeoutError
from unisono.torch_backend.barrier_text import barrier_text
from unisono.torch_backend.coalesce import CoalescedCalls
from unisono.torch_backend.convert import seconds
from unisono.torch_backend.data_movement import DataMovement
from unisono.torch_backend.missing_methods import refuse_missing_methods
from unisono.torch_backend.pending_work import DONE, CombinedHandle
from unisono.torch_backend.private import (
    WorkBase,
    hide_from_dynamo,
    is_profiling,
    name_group,
    prefixed,
)
from unisono.torch_backend.reducing_collectives import Reductions


class ProcessGroup(Reductions, DataMovement):
    """A torch process group with a communicator of the same ranks."""

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> WorkBase:
        """Waits until every rank has called `barrier`."""
        self._begin()
        if isinstance(opts, timedelta):
            opts, timeout = None, opts
        limit_s = seconds(timeout if opts is None else opts.timeout)
        if limit_s is not None:
            with self._within(limit_s):
                return self._barrier(opts is None or opts.asyncOp)
        return self._barrier(opts is None or opts.asyncOp)

    def _barrier(self, later: bool) -> WorkBase:
        if later:
            return self._pending(self._comm.barrier(async_op=True), [])
        self._comm.barrier()
        return DONE

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Waits until every rank has called `monitored_barrier`. The timeout error names the
        missing ranks, also in the words of Gloo, for which programs search.
        """
        self._begin()
        if timeout is not None:  # for torch, zero is a time here and "not given" elsewhere
            timeout = max(timeout, timedelta(milliseconds=1))
        try:
            with self._within(timeout):
                self._comm.barrier()
        except CollectiveTimeoutError as error:
            text = barrier_text(str(error), self.communicator.rank, timeout, wait_all_ranks)
            raise CollectiveTimeoutError(text) from error

    def _start_coalescing(self, device: torch.device) -> None:
        if isinstance(self._comm, CoalescedCalls):
            raise ValueError("coalescing has already started on this group: end it first")
        if is_profiling() is not self._is_profiled:
            self._change_tracing()  # the recorded calls go to the communicator of this moment
        self._comm = CoalescedCalls(self._comm)

    def _end_coalescing(self, device: torch.device) -> WorkBase:
        recorder = self._comm
        if not isinstance(recorder, CoalescedCalls):
            raise ValueError("coalescing has not started on this group: start it first")
        self._comm = recorder.comm
        return self._pending(CombinedHandle(recorder.issue()), [])

    def get_group_store(self) -> Any:
        """Returns the store through which this group was made."""
        return self.store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later calls."""
        limit_s = seconds(timeout)
        if limit_s is None:
            raise ValueError(f"timeout: expected a positive time, not {timeout}")
        self.communicator.timeout_s = limit_s

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """Makes a group of some of this group's ranks, without a store. Returns None on other
        ranks.
        """
        name = group_name or self._name_of_split(new_ranks)
        comm = self.communicator.group(new_ranks)
        if comm is None:
            return None
        group = ProcessGroup(comm, self.store, [self.global_ranks[rank] for rank in new_ranks])
        if timeout is not None:
            group.set_timeout(timeout)
        name_group(group, name, group_desc or "split")
        self.derived(group)
        return group

    def _name_of_split(self, ranks: list[int]) -> str:
        self._splits += 1
        return f"{self.group_name}:split{self._splits}:{'-'.join(map(str, ranks))}"

    def shrink_group(
        self, exclude: Sequence[int] = (), timeout: timedelta | None = None
    ) -> ProcessGroup:
        """Makes a new group of the living ranks, without those in `exclude`. After that, the old
        group (`self`) refuses all work.
        """
        comm = self.communicator.shrink(exclude, timeout_s=seconds(timeout))
        members = comm.former_ranks
        name = f"{self.group_name}:shrunk:{'-'.join(map(str, members))}"
        # Keys in the store contain rank numbers, and the ranks have new numbers. A prefix keeps the
        # new keys apart from the old ones.
        store = prefixed(self.store, name)
        group = self._after(comm, store, [self.global_ranks[rank] for rank in members], name)
        name_group(group, name, "shrunk")
        self.derived(group)
        return group

    def _after(self, comm: Any, store: Any, global_ranks: list[int], name: str) -> ProcessGroup:
        return ProcessGroup(comm, store, global_ranks)

    def abort(self) -> None:
        """Ends every pending call on all ranks with AbortedError."""
        self.communicator.abort("torch aborted the process group")
        self._completer.close()

    def shutdown(self) -> None:
        """Leaves the group; `destroy_process_group` calls this."""
        self._leave()


refuse_missing_methods(ProcessGroup)
hide_from_dynamo(ProcessGroup)
