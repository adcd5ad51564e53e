"""The process group's collectives that only move data, and point-to-point messages."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch

from unisono.errors import UnsupportedError
from unisono.torch_backend.convert import (
    CallOptions,
    elements_of,
    movable,
    movable_list,
    split_sizes,
)
from unisono.torch_backend.group_base import GroupBase
from unisono.torch_backend.pending_work import DONE
from unisono.torch_backend.private import WorkBase, hide_from_dynamo
from unisono.torch_backend.refusal_report import reports_refusals


class DataMovement(GroupBase):
    """Collectives without arithmetic. A bare tensor is treated as a list of one tensor."""

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int = 0
    ) -> WorkBase:
        """Copies the root's tensor to every other rank."""
        if opts is None or isinstance(opts, int):
            options = CallOptions(rootRank=root if opts is None else opts)
            with self._within(timeout):
                return self.broadcast(_listed(tensors), options)
        self._begin()
        tensor = movable(tensors[0])
        if opts.asyncOp:
            handle = self._comm.broadcast(tensor, opts.rootRank, async_op=True)
            return self._pending(handle, tensors)
        self._comm.broadcast(tensor, opts.rootRank)
        return DONE

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> WorkBase:
        """Gathers every rank's tensor, in rank order, in one tensor."""
        self._begin()
        source, target = movable(input), movable(output)
        if opts is None or opts.asyncOp:
            return self._pending(self._comm.all_gather(source, target, async_op=True), [output])
        self._comm.all_gather(source, target)
        return DONE

    @reports_refusals
    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> WorkBase:
        """Gathers every rank's tensor in a list; lengths may differ."""
        if isinstance(inputs, torch.Tensor):
            with self._within(timeout):
                return self.allgather([outputs], [inputs], opts)
        if len(inputs) != 1:
            raise UnsupportedError(f"allgather: expected one input tensor, not {len(inputs)}")
        self._begin()
        source, target = movable(inputs[0]), movable_list(outputs[0])
        if opts is None or opts.asyncOp:
            return self._pending(self._comm.all_gather(source, target, async_op=True), outputs[0])
        self._comm.all_gather(source, target)
        return DONE

    @reports_refusals
    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> WorkBase:
        """Gathers several tensors per rank: `outputs[r][i]` becomes tensor i of rank r."""
        self._begin()
        calls = [
            partial(self._comm.all_gather, movable(tensor), movable_list(list(pieces)))
            for tensor, pieces in zip(inputs, zip(*outputs, strict=True), strict=True)
        ]
        results = [piece for pieces in outputs for piece in pieces]
        return self._in_order("all_gather", calls, inputs, results, opts is None or opts.asyncOp)

    @reports_refusals
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> WorkBase:
        """Issues several `all_gather_single` calls and returns one work for all of them."""
        self._begin()
        calls = [
            partial(self._comm.all_gather, movable(source), movable(target))
            for target, source in zip(outputs, inputs, strict=True)
        ]
        return self._in_order("all_gather", calls, inputs, outputs, opts is None or opts.asyncOp)

    @reports_refusals
    def gather(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> WorkBase:
        """Gathers every rank's tensor in a list at the root; on other ranks `outputs` is empty."""
        if isinstance(inputs, torch.Tensor):
            options = CallOptions(rootRank=root if opts is None else opts)
            with self._within(timeout):
                return self.gather([outputs], [inputs], options)
        self._begin()
        source = movable(inputs[0])
        at_root = self.communicator.rank == opts.rootRank
        target = movable_list(outputs[0]) if at_root else None
        if opts.asyncOp:
            handle = self._comm.gather(source, target, opts.rootRank, async_op=True)
            return self._pending(handle, outputs[0] if at_root else [])
        self._comm.gather(source, target, opts.rootRank)
        return DONE

    def gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> WorkBase:
        """Gathers every rank's tensor, in rank order, in one tensor at the root."""
        self._begin()
        root = 0 if opts is None else opts.rootRank
        at_root = self.communicator.rank == root
        source, target = movable(input), movable(output) if at_root else None
        if opts is None or opts.asyncOp:
            handle = self._comm.gather(source, target, root, async_op=True)
            return self._pending(handle, [output] if at_root else [])
        self._comm.gather(source, target, root)
        return DONE

    @reports_refusals
    def scatter(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> WorkBase:
        """Sends tensor r of the root's list to rank r; on other ranks `inputs` is empty."""
        if isinstance(outputs, torch.Tensor):
            options = CallOptions(rootRank=root if opts is None else opts)
            with self._within(timeout):
                return self.scatter([outputs], [inputs], options)
        self._begin()
        target = movable(outputs[0])
        source = movable_list(inputs[0]) if self.communicator.rank == opts.rootRank else None
        if opts.asyncOp:
            handle = self._comm.scatter(source, target, opts.rootRank, async_op=True)
            return self._pending(handle, outputs)
        self._comm.scatter(source, target, opts.rootRank)
        return DONE

    @reports_refusals
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> WorkBase:
        """Sends rows to every rank and receives rows from every rank. Without sizes, all shares are
        equal.
        """
        source, target = movable(input), movable(output)
        if not (output_split_sizes or input_split_sizes):
            return self._all_to_all((source, target), [input], [output], opts, timeout)
        ranks = self.communicator.size
        sends = split_sizes(input, input_split_sizes, ranks)
        receives = split_sizes(output, output_split_sizes, ranks)
        if not (source.is_contiguous() and target.is_contiguous()):
            sources = movable_list(list(torch.split(input, sends)))
            targets = movable_list(list(torch.split(output, receives)))
            return self._all_to_all((sources, targets), [input], [output], opts, timeout)
        # Elements instead of rows, because input and output may have rows of different widths.
        sends, receives = elements_of(source, sends), elements_of(target, receives)
        rows = source.view(-1), sends, receives, target.view(-1)
        return self._all_to_all(rows, [input], [output], opts, timeout, method="all_to_all_v")

    def alltoall(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> WorkBase:
        """Sends one tensor to every rank and receives one from every rank; lengths may differ."""
        arguments = movable_list(inputs), movable_list(outputs)
        return self._all_to_all(arguments, inputs, outputs, opts, timeout)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> WorkBase:
        """Begins a send of a tensor to a rank of the group."""
        self._begin()
        handle = self._comm.send(movable(tensors[0]), rank, tag, async_op=True)
        if handle.is_completed() and handle.exception() is None:
            return DONE
        return self._pending(handle, tensors)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> WorkBase:
        """Begins a receive of a tensor from a rank of the group."""
        self._begin()
        handle = self._comm.recv(movable(tensors[0]), rank, tag, async_op=True)
        return self._pending(handle, tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> WorkBase:
        """Begins a receive from the first rank that sends a tensor with this tag."""
        self._begin()
        handle = self._comm.recv(movable(tensors[0]), None, tag, async_op=True)
        return self._pending(handle, tensors)

    @reports_refusals
    def _all_to_all(
        self,
        arguments: tuple[Any, ...],
        read: list[torch.Tensor],
        results: list[torch.Tensor],
        opts: Any,
        timeout: timedelta | None,
        *,
        method: str = "all_to_all",
    ) -> WorkBase:
        if timeout is not None or isinstance(opts, timedelta):
            with self._within(opts if timeout is None else timeout):
                return self._all_to_all(arguments, read, results, None, None, method=method)
        self._begin()
        later = opts is None or opts.asyncOp
        # `_begin` may have replaced the communicator.
        issue = partial(getattr(self._comm, method), *arguments, async_op=later)
        handle = self._as_one("all_to_all", read, issue)
        return self._pending(handle, results) if later else DONE

    # Names in older torch versions and in code for those versions.
    _allgather_base = all_gather_single
    gather_into_tensor = gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


hide_from_dynamo(DataMovement)
