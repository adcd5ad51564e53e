"""A transfer over any process group of torch.distributed: Gloo, NCCL, HCCL, MPI."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from unisono.controller.transfers.blocking_transfer import BlockingTransfer
from unisono.controller.transfers.transfer import Array
from unisono.errors import UnsupportedError
from unisono.extras import with_cure

_OPS = {"sum": "SUM", "prod": "PRODUCT", "product": "PRODUCT", "min": "MIN", "max": "MAX",
        "band": "BAND", "bor": "BOR", "bxor": "BXOR"}  # fmt: skip


class ProcessGroupTransfer(BlockingTransfer):
    """Moves a controller's data over two new groups with the ranks and the backend of `group`.

    If `group` is None, it is the default group. All its ranks must create the transfer. They must
    be the controller's ranks in the same order. Arrays are tensors on the group's devices, or NumPy
    arrays if the group supports the CPU. `timeout` is that of the new groups. None means the
    timeout of `group` if it runs on unisono, and torch's default otherwise: torch does not publish
    the timeouts of other groups.

    >>> import torch.distributed as dist, unisono
    >>> from unisono.controller import Controller
    >>> def program():
    ...     with unisono.init() as comm:
    ...         dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
    ...         return Controller(comm, transfer=ProcessGroupTransfer())
    """

    def __init__(self, group: Any = None, *, timeout: timedelta | None = None) -> None:
        super().__init__(_ProcessGroup(group, timeout), _ProcessGroup(group, timeout))


class _ProcessGroup:
    """Blocking collectives on a new group of the same ranks."""

    def __init__(self, group: Any, timeout: timedelta | None) -> None:
        try:
            from torch import distributed as dist
        except ModuleNotFoundError as error:
            raise with_cure(error, "ProcessGroupTransfer") from None

        self._dist = dist
        self._device = _device_of(group)
        comm = getattr(group or dist.group.WORLD, "communicator", None)
        if timeout is None and comm is not None:
            timeout = timedelta(seconds=comm.timeout_s)
        self._group = dist.new_group(
            dist.get_process_group_ranks(group or dist.group.WORLD),
            timeout=timeout,
            backend=dist.get_backend(group),
            use_local_synchronization=True,
        )

    @property
    def size(self) -> int:
        return self._dist.get_world_size(self._group)

    def all_reduce(self, flat: Array, op: str) -> None:
        tensor = self._tensor(flat)
        self._dist.all_reduce(tensor, self._op(op), group=self._group)
        self._finish(tensor, flat)

    def broadcast(self, flat: Array, root: int) -> None:
        tensor = self._tensor(flat)
        self._dist.broadcast(tensor, group_src=root, group=self._group)
        self._finish(tensor, flat)

    def all_gather(self, array: Array, lengths: Sequence[int]) -> Array:
        import torch

        mine = self._tensor(array)
        if mine.dim() == 0:
            mine = mine.reshape(1)
        longest = max(lengths)  # Gloo and NCCL gather arrays of equal length only
        padded = mine.new_zeros((longest, *mine.shape[1:]))
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in lengths]
        self._dist.all_gather(parts, padded, group=self._group)
        rows = [part[:length] for part, length in zip(parts, lengths, strict=True)]
        return _like(array, torch.cat(rows))

    def reduce_scatter(self, array: Array, op: str) -> Array:
        import torch

        tensor = self._tensor(array)
        share = torch.empty_like(tensor[: len(tensor) // self.size])
        # torch before 2.13 has it by an older name
        scatter = getattr(self._dist, "reduce_scatter_single", None) or (
            self._dist.reduce_scatter_tensor
        )
        scatter(share, tensor, self._op(op), group=self._group)
        return _like(array, share)

    def all_to_all(self, array: Array) -> Array:
        import torch

        tensor = self._tensor(array)
        received = torch.empty_like(tensor)
        self._dist.all_to_all_single(received, tensor, group=self._group)
        return _like(array, received)

    def close(self) -> None:
        """Keeps the group until torch destroys it. A thread may still be in a collective."""

    def _op(self, op: str) -> Any:
        if op not in _OPS:
            raise UnsupportedError(f"{op}: torch.distributed reduces with {', '.join(_OPS)}")
        return getattr(self._dist.ReduceOp, _OPS[op])

    def _tensor(self, array: Array) -> Any:
        """Returns the array as a tensor. A NumPy array, such as the number of a vote, is copied to
        the group's device.
        """
        import torch

        if isinstance(array, np.ndarray):
            return torch.from_numpy(array).to(self._device)
        if array.device.type != "cpu":
            torch.accelerator.synchronize()  # the program's stream may still write the array
        return array

    def _finish(self, tensor: Any, array: Array) -> None:
        if tensor.device.type == "cpu":
            return
        if isinstance(array, np.ndarray):
            array[...] = tensor.cpu().numpy()
        else:
            import torch

            torch.accelerator.synchronize()


def _device_of(group: Any) -> Any:
    """Returns the device to which NumPy arrays are copied."""
    import torch
    from torch import distributed as dist

    serves_cpu = dist.get_backend(group) not in ("nccl", "hccl", "xccl")
    return torch.device("cpu") if serves_cpu else torch.accelerator.current_accelerator()


def _like(array: Array, tensor: Any) -> Array:
    return tensor.cpu().numpy() if isinstance(array, np.ndarray) else tensor
