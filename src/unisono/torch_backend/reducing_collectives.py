"""The process group's reducing collectives: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from unisono import native
from unisono.communicator import dtype_of
from unisono.errors import UnsupportedError
from unisono.torch_backend.convert import REDUCE_OPS, CallOptions, reduce_op
from unisono.torch_backend.group_base import GroupBase
from unisono.torch_backend.pending_work import DONE, CombinedHandle, FinishedWork
from unisono.torch_backend.private import WorkBase, hide_from_dynamo, is_profiling
from unisono.torch_backend.refusal_report import reports_refusals
from unisono.torch_backend.sparse import all_reduce_sparse
from unisono.types import DType, ReduceOp

_SUM = dist.ReduceOp.SUM


class Reductions(GroupBase):
    """Reducing collectives.

    The usual call (lists of tensors and an options object) takes a short code path. All other calls
    (bare tensors, a reduction instead of options, PREMUL_SUM) take a general path.
    """

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> WorkBase:
        """Reduces a tensor over all ranks, in place."""
        try:
            reduction = REDUCE_OPS[hash(opts.reduceOp)]
            later = opts.asyncOp
        except (AttributeError, KeyError):
            reduction = None
        if reduction is None:
            with self._within(timeout):
                return self._allreduce_any(tensors, opts if op is None else op)
        tensor = tensors[0]
        if len(tensors) != 1 or tensor.is_sparse:
            return self._allreduce_each(tensors, reduction, later)
        self._sequence += 1
        if is_profiling() is not self._is_profiled:
            self._change_tracing()
        if later:
            return self._pending(self._comm.all_reduce(tensor, reduction, async_op=True), tensors)
        self._comm.all_reduce(tensor, reduction)
        return DONE

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> WorkBase:
        """Reduces several tensors over all ranks, in place."""
        return self._allreduce_any(tensors, opts)

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = _SUM,
        timeout: timedelta | None = None,
        *,
        root: int = 0,
    ) -> WorkBase:
        """Reduces a tensor over all ranks, in place on the root."""
        if isinstance(tensors, torch.Tensor):
            options = CallOptions(reduceOp=op, rootRank=root if opts is None else opts)
            with self._within(timeout):
                return self.reduce([tensors], options)
        reduction, factor = reduce_op(opts.reduceOp)
        _scale_in_place(tensors, factor)
        self._begin()
        if opts.asyncOp:
            handle = self._comm.reduce(tensors[0], opts.rootRank, reduction, async_op=True)
            return self._pending(handle, tensors)
        self._comm.reduce(tensors[0], opts.rootRank, reduction)
        return DONE

    def reduce_scatter(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> WorkBase:
        """Reduces a list of pieces over all ranks; rank r gets piece r."""
        if isinstance(outputs, torch.Tensor):
            with self._within(timeout):
                return self._reduce_scatter(outputs, inputs, opts if op is None else op)
        if len(outputs) != 1:
            raise UnsupportedError(
                f"reduce_scatter: expected one output tensor, not {len(outputs)}"
            )
        return self._reduce_scatter(outputs[0], inputs[0], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> WorkBase:
        """Reduces a tensor over all ranks; rank r gets share r."""
        return self._reduce_scatter(output, input, opts)

    @reports_refusals
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> WorkBase:
        """Issues several `reduce_scatter_single` calls and returns one work for all of them."""
        self._begin()
        reduction, factor = reduce_op(_SUM if opts is None else opts.reduceOp)
        calls = [
            partial(self._comm.reduce_scatter, _scaled(source, factor), target, reduction)
            for target, source in zip(outputs, inputs, strict=True)
        ]
        later = opts is None or opts.asyncOp
        return self._in_order("reduce_scatter", calls, inputs, outputs, later)

    def _reduce_scatter(self, output: torch.Tensor, source: Any, opts: Any) -> WorkBase:
        try:
            reduction = REDUCE_OPS[hash(opts.reduceOp)]
            later = opts.asyncOp
        except (AttributeError, KeyError):
            reduction = None
        if reduction is None:
            reduction, factor = reduce_op(_SUM if opts is None else getattr(opts, "reduceOp", opts))
            source = _scaled(source, factor)
            later = getattr(opts, "asyncOp", True)
        self._begin()
        if later:
            handle = self._comm.reduce_scatter(source, output, reduction, async_op=True)
            return self._pending(handle, [output])
        self._comm.reduce_scatter(source, output, reduction)
        return DONE

    def _allreduce_any(self, tensors: Any, opts: Any) -> WorkBase:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        reduction, factor = reduce_op(_SUM if opts is None else getattr(opts, "reduceOp", opts))
        _scale_in_place(tensors, factor)
        return self._allreduce_each(tensors, reduction, getattr(opts, "asyncOp", True))

    def _allreduce_each(
        self, tensors: list[torch.Tensor], reduction: ReduceOp, later: bool
    ) -> WorkBase:
        self._begin()
        is_sparse = any(tensor.is_sparse for tensor in tensors)
        later = later and not all(tensor.is_sparse for tensor in tensors)
        handle = self._as_one(
            "sparse_all_reduce" if is_sparse else "all_reduce",
            tensors,
            partial(self._issue_each, tensors, reduction, later),
        )
        return self._pending(handle, tensors) if later else FinishedWork(tensors)

    def _issue_each(
        self, tensors: list[torch.Tensor], reduction: ReduceOp, later: bool
    ) -> CombinedHandle:
        """Reduces tensors in order. If `later`, the handle is of those that are not sparse."""
        handles = []
        for tensor in tensors:
            if tensor.is_sparse:
                if not tensor.is_cpu:
                    raise UnsupportedError(
                        "all_reduce: expected sparse tensors in CPU memory, got one on a device; "
                        "tensor.cpu() and tensor.to_dense() work"
                    )
                all_reduce_sparse(self._comm, tensor, reduction)
            elif later:
                handles.append(self._comm.all_reduce(tensor, reduction, async_op=True))
            else:
                self._comm.all_reduce(tensor, reduction)
        return CombinedHandle(handles)

    # Names in older torch versions and in code for those versions.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _scale_in_place(tensors: list[torch.Tensor], factor: Any) -> None:
    if factor is not None:
        for tensor in tensors:
            _multiply(tensor.detach(), factor, tensor.detach())


def _scaled(source: Any, factor: Any) -> Any:
    """Returns the tensor or list of tensors times the factor of PREMUL_SUM. Does not change its
    input.
    """
    if factor is None:
        return source
    if isinstance(source, torch.Tensor):
        x = source.detach()
        return _multiply(x, factor, torch.empty_like(x))
    return [_scaled(piece, factor) for piece in source]


def _multiply(x: torch.Tensor, factor: Any, out: torch.Tensor) -> torch.Tensor:
    """Writes x * factor to `out`, rounded to the element type like `Tensor.mul_`.

    Torch cannot multiply 8-bit floats; here they are rounded like other narrow floats.
    """
    if not x.is_cpu:
        wide = x.float() if x.is_floating_point() and x.element_size() < 4 else x
        return out.copy_(wide * factor)
    number = x.is_floating_point() and isinstance(factor, (int, float))
    if number and not x.is_sparse and x.is_contiguous() and out.is_contiguous():
        dtype = dtype_of(x)
        kind = np.float64 if dtype is DType.FLOAT64 else np.float32
        with np.errstate(over="ignore"):
            by = kind(factor).tobytes()
        native.scale(dtype, out.data_ptr(), x.data_ptr(), x.numel(), by)
        return out
    return out.copy_(x * factor) if out is not x else out.mul_(factor)


hide_from_dynamo(Reductions)
