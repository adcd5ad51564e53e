"""The collectives of the process group that only move data, and point-to-point."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch

from unisono.errors import UnsupportedError
from unisono.torch_backend.base import GroupBase
from unisono.torch_backend.convert import movable, movable_list, seconds, split_rows
from unisono.torch_backend.private import WorkBase, hide_from_dynamo
from unisono.torch_backend.work import DONE


class Movement(GroupBase):
    """Collectives without arithmetic. Bare tensors may stand for lists of one tensor."""

    def broadcast(
        self,
        tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> WorkBase:
        """Copy the root's tensor into every other rank's."""
        if isinstance(tensors, torch.Tensor):
            tensors, root, later = [tensors], opts if root is None else root, True
        else:
            root, later = opts.rootRank, opts.asyncOp
        self._sequence += 1
        tensor = movable(tensors[0])
        if later:
            handle = self._comm.broadcast(tensor, root, async_op=True)
            return self._pending(handle, tensors, seconds(timeout))
        self._comm.broadcast(tensor, root)
        return DONE

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> WorkBase:
        """Collect every rank's tensor, in rank order, in one tensor."""
        self._sequence += 1
        source, target = movable(input), movable(output)
        if opts is None or opts.asyncOp:
            return self._pending(self._comm.all_gather(source, target, async_op=True), [output])
        self._comm.all_gather(source, target)
        return DONE

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> WorkBase:
        """Collect every rank's tensor in a list; their lengths may differ."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        if len(inputs) != 1:
            raise UnsupportedError("allgather takes one input tensor a rank")
        self._sequence += 1
        pieces = outputs[0]
        source, target = movable(inputs[0]), movable_list(pieces)
        if getattr(opts, "asyncOp", True):
            handle = self._comm.all_gather(source, target, async_op=True)
            return self._pending(handle, pieces, seconds(timeout))
        self._comm.all_gather(source, target)
        return DONE

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> WorkBase:
        """Collect several tensors a rank: `outputs[r][i]` becomes tensor i of rank r."""
        calls = [
            partial(self._comm.all_gather, movable(tensor), movable_list(list(pieces)))
            for tensor, pieces in zip(inputs, zip(*outputs, strict=True), strict=True)
        ]
        results = [piece for pieces in outputs for piece in pieces]
        return self._in_order(calls, results, getattr(opts, "asyncOp", True))

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> WorkBase:
        """Several all_gather_single as one work."""
        calls = [
            partial(self._comm.all_gather, movable(source), movable(target))
            for target, source in zip(outputs, inputs, strict=True)
        ]
        return self._in_order(calls, outputs, getattr(opts, "asyncOp", True))

    def gather(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> WorkBase:
        """Collect every rank's tensor in a list at the root; elsewhere `outputs` is empty."""
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
            root, later = opts if root is None else root, True
        else:
            root, later = opts.rootRank, opts.asyncOp
        self._sequence += 1
        source = movable(inputs[0])
        pieces = outputs[0] if outputs else []
        target = movable_list(pieces) if self._comm.rank == root else None
        if later:
            handle = self._comm.gather(source, target, root, async_op=True)
            return self._pending(handle, pieces, seconds(timeout))
        self._comm.gather(source, target, root)
        return DONE

    def scatter(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> WorkBase:
        """Hand the root's list of tensors out, one a rank; elsewhere `inputs` is empty."""
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
            root, later = opts if root is None else root, True
        else:
            root, later = opts.rootRank, opts.asyncOp
        self._sequence += 1
        target = movable(outputs[0])
        source = movable_list(inputs[0]) if self._comm.rank == root else None
        if later:
            handle = self._comm.scatter(source, target, root, async_op=True)
            return self._pending(handle, outputs, seconds(timeout))
        self._comm.scatter(source, target, root)
        return DONE

    def all_to_all_single(  # noqa: PLR0917 - torch's signature
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> WorkBase:
        """Send rows to every rank and receive rows from every rank; no sizes: equal shares."""
        ranks = self._comm.size
        source: Any = movable(input)
        target: Any = movable(output)
        if output_split_sizes or input_split_sizes or source is not input:
            source = movable_list(split_rows(input, input_split_sizes, ranks))
            target = movable_list(split_rows(output, output_split_sizes, ranks))
        return self._all_to_all(target, source, [output], opts, timeout)

    def alltoall(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> WorkBase:
        """Send a tensor to every rank and receive one from every rank; lengths may differ."""
        return self._all_to_all(movable_list(outputs), movable_list(inputs), outputs, opts, timeout)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> WorkBase:
        """Start sending a tensor to a rank of the group."""
        self._sequence += 1
        handle = self._comm.send(movable(tensors[0]), rank, tag, async_op=True)
        return self._pending(handle, tensors)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> WorkBase:
        """Start receiving a tensor from a rank of the group."""
        self._sequence += 1
        handle = self._comm.recv(movable(tensors[0]), rank, tag, async_op=True)
        return self._pending(handle, tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> WorkBase:
        """Start receiving a tensor from whichever rank sends one with this tag first."""
        self._sequence += 1
        handle = self._comm.recv(movable(tensors[0]), None, tag, async_op=True)
        return self._pending(handle, tensors)

    def _all_to_all(
        self,
        target: Any,
        source: Any,
        results: list[torch.Tensor],
        opts: Any,
        timeout: timedelta | None,
    ) -> WorkBase:
        self._sequence += 1
        if getattr(opts, "asyncOp", True):
            handle = self._comm.all_to_all(source, target, async_op=True)
            return self._pending(handle, results, seconds(timeout))
        self._comm.all_to_all(source, target)
        return DONE

    # Names that older torch versions, and older callers, use.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


hide_from_dynamo(Movement)
