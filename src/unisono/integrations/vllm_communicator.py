"""The communicator of vLLM's groups in CPU memory, in the place of vLLM's own shared memory.

vLLM's own shared memory serves groups of tensor and pipeline parallelism on one host, of 2, 3, 4 or
8 ranks. This communicator serves all groups, also of several hosts, and pieces of different
lengths.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed as dist
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.logger import init_logger

from unisono.communicator import Communicator
from unisono.torch_backend import communicator_of, movable

_log = init_logger("vllm.unisono")  # vLLM shows only loggers below "vllm"


def communicator_of_group(
    cpu_group: Any,
    device: torch.device | None = None,
    device_group: Any = None,
    unique_name: str = "",
    **options: Any,
) -> CpuCommunicator:
    """Returns the communicator of a new group of vLLM: vLLM's own if Unisono does not serve the
    group.
    """
    served = communicator_of(device_group) is not None
    if not served:
        _log.error(
            "vLLM's group %s is not one of unisono, so vLLM's own communicator serves it: torch "
            "has not read UNISONO_REPLACE=gloo", unique_name,
        )  # fmt: skip
    kind = UnisonoCommunicator if served else CpuCommunicator
    return kind(cpu_group, device, device_group, unique_name, **options)


class UnisonoCommunicator(CpuCommunicator):  # type: ignore[misc]
    """The device communicator of a group."""

    def __init__(
        self,
        cpu_group: Any,
        device: torch.device | None = None,
        device_group: Any = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        # CpuCommunicator's own constructor would make vLLM's shared memory.
        DeviceCommunicatorBase.__init__(
            self, cpu_group, device, device_group, unique_name, use_all2all=use_all2all
        )
        self.comm: Communicator = communicator_of(device_group)
        self.dist_module = GroupCalls(self.comm, unique_name)
        self.supports_tensor_dict = True
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

            self.all2all_manager = AgRsAll2AllManager(cpu_group)
        if self.rank == 0:
            _log.info("unisono serves vLLM's group %s of %d ranks", unique_name, self.world_size)

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Gathers tensors with `sizes[r]` rows of rank r; None: with equally many rows."""
        if isinstance(input_, list):
            return [self._gathered(each, dim, sizes) for each in input_]
        return self._gathered(input_, dim, sizes)

    def _gathered(self, tensor: torch.Tensor, dim: int, sizes: list[int] | None) -> torch.Tensor:
        rows = tensor.movedim(dim, 0).contiguous()
        counts = [rows.shape[0]] * self.world_size if sizes is None else sizes
        out = rows.new_empty((sum(counts), *rows.shape[1:]))
        self.comm.all_gather_v(_as_rows(rows), counts, _as_rows(out))
        return out.movedim(0, dim)

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Sums a tensor over all ranks; rank r gets `sizes[r]` rows, or None: an equal share."""
        rows = input_.movedim(dim, 0).contiguous()
        share, rest = divmod(rows.shape[0], self.world_size)
        if sizes is None and rest:
            raise ValueError(
                f"reduce_scatterv: expected a multiple of {self.world_size} rows, one share per "
                f"rank, not {rows.shape[0]}"
            )
        counts = [share] * self.world_size if sizes is None else sizes
        out = rows.new_empty((counts[self.rank_in_group], *rows.shape[1:]))
        self.comm.reduce_scatter_v(rows, counts, out)
        return out.movedim(0, dim).contiguous()


class GroupCalls:
    """The calls of `CpuCommunicator` to the library that moves its data."""

    def __init__(self, comm: Communicator, group: str) -> None:
        self._comm = comm
        self._group = group

    def all_reduce(self, input: torch.Tensor, group: Any = None) -> None:
        """Sums a tensor over all ranks, in place."""
        if torch.compiler.is_compiling():
            torch.ops.unisono.all_reduce_(input, self._group)
        else:
            self._comm.all_reduce(input)

    def all_gather_into_tensor(
        self, output: torch.Tensor, input: torch.Tensor, group: Any = None
    ) -> None:
        """Gathers the tensors of all ranks in one, in rank order."""
        if torch.compiler.is_compiling():
            torch.ops.unisono.all_gather_into_(output, input, self._group)
        else:
            self._comm.all_gather(movable(input), movable(output))

    def gather(
        self,
        input: torch.Tensor,
        gather_list: list[torch.Tensor] | None,
        dst: int = -1,
        group: Any = None,
    ) -> None:
        """Gathers the tensors of all ranks on rank `dst` of the world."""
        into = None if gather_list is None else [movable(each) for each in gather_list]
        self._comm.gather(movable(input), into, dist.get_group_rank(group, dst))

    def send_tensor_dict(self, tensor_dict: dict[str, Any], dst: int) -> None:
        """Sends named tensors and other values to rank `dst` of the group."""
        described, tensors = parallel_state._split_tensor_dict(tensor_dict)
        head = np.frombuffer(pickle.dumps(described), np.uint8)
        self._comm.send(np.array([len(head)]), dst)
        with self._comm.batch():
            for each in (head, *_messages(tensors)):
                self._comm.send(each, dst)

    def recv_tensor_dict(self, src: int) -> dict[str, Any]:
        """Receives what rank `src` of the group has sent."""
        length = np.zeros(1, np.int64)
        self._comm.recv(length, src)
        head = np.empty(length[0], np.uint8)
        self._comm.recv(head, src)
        found = {name: _place_of(value) for name, value in pickle.loads(head.tobytes())}
        tensors = [each for each in found.values() if isinstance(each, torch.Tensor)]
        with self._comm.batch():
            for each in _messages(tensors):
                self._comm.recv(each, src)
        return found


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or its bytes in as many rows if its element type can only be moved."""
    moved = movable(tensor)
    return moved if moved is tensor else moved.view(tensor.shape[0], -1)


def _place_of(value: Any) -> Any:
    """Returns a tensor for a description of one, and any other value itself."""
    if isinstance(value, parallel_state.TensorMetadata):
        return torch.empty(value.size, dtype=value.dtype)
    return value


def _messages(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [movable(each.contiguous()) for each in tensors if each.numel()]


def _comm_of(group: str) -> Communicator:
    """Returns the communicator of the group that vLLM registered under this name."""
    found: Communicator = parallel_state._groups[group]().device_communicator.comm
    return found


def _all_reduce(x: torch.Tensor, group: str) -> None:
    _comm_of(group).all_reduce(x)


def _all_gather_into(output: torch.Tensor, x: torch.Tensor, group: str) -> None:
    _comm_of(group).all_gather(movable(x), movable(output))


def _define_operations() -> Any:
    """Defines the operations of compiled code. Torch removes them with the returned object."""
    make: Any = torch.library.Library  # torch does not annotate it
    library: Any = make("unisono", "FRAGMENT")
    for schema, call in (
        ("all_reduce_(Tensor(a!) x, str group) -> ()", _all_reduce),
        ("all_gather_into_(Tensor(a!) output, Tensor x, str group) -> ()", _all_gather_into),
    ):
        name = library.define(schema)
        library.impl(name, call, "CPU")
        torch.library.register_fake(f"unisono::{name}", lambda *arguments: None, lib=library)
    return library


OPERATIONS = _define_operations()
"""Keeps the operations defined."""
