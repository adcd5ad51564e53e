"""A backend of `ray.util.collective`, for NumPy arrays and CPU tensors.

from unisono.integrations.ray_collective import register

ray.init(runtime_env={"worker_process_setup_hook": register})  # registers in all workers
register()
collective.create_collective_group(actors, 4, [0, 1, 2, 3], backend="unisono")
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util import collective
from ray.util.collective import types
from ray.util.collective.collective_group.base_collective_group import BaseGroup

from unisono import config
from unisono.communicator import join_by_store
from unisono.errors import UnsupportedError
from unisono.integrations.ray_store import store_of_group

BACKEND_NAME = "unisono"
_REDUCTIONS = {
    types.ReduceOp.SUM: "sum",
    types.ReduceOp.PRODUCT: "prod",
    types.ReduceOp.MIN: "min",
    types.ReduceOp.MAX: "max",
}


def register() -> None:
    """Registers the backend `unisono` with Ray, in this process. A second call does nothing.

    The program and each actor of a group must call this, or Ray's `worker_process_setup_hook`.
    Raises `UnsupportedError` if this Ray does not take backends of other libraries.
    """
    try:
        from ray.util.collective.backend_registry import register_collective_backend
    except ImportError:
        raise UnsupportedError(
            f"Ray {ray.__version__} takes no collective backends of other libraries: install a "
            'newer Ray, or write backend="gloo" and set UNISONO_REPLACE=gloo'
        ) from None
    if not collective.collective.is_backend_available(BACKEND_NAME):
        register_collective_backend(BACKEND_NAME, UnisonoGroup)


class UnisonoGroup(BaseGroup):  # type: ignore[misc]
    """A collective group of Ray over a communicator of the same ranks.

    Ray makes it from the functions of `ray.util.collective`. The results of `allreduce`,
    `broadcast` and `recv` are in place, and that of `reduce` on the root.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._store = store_of_group(group_name)
        self._comm = join_by_store(self._store, rank, world_size, config.settings())

    def destroy_group(self) -> None:
        """Leaves the group."""
        self._comm.close()
        self._store.clear()

    @classmethod
    def backend(cls) -> str:
        """Returns the name of the backend."""
        return BACKEND_NAME

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Returns True: the class exists only where Unisono is installed."""
        return True

    def allreduce(self, tensor: list[Any], allreduce_options: Any) -> None:
        """Reduces an array over all ranks, in place."""
        self._comm.all_reduce(_only(tensor), _REDUCTIONS[allreduce_options.reduceOp])

    def barrier(self, barrier_options: Any = None) -> None:
        """Waits until every rank has called `barrier`."""
        self._comm.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any) -> None:
        """Reduces an array over all ranks, in place on the root; other ranks keep theirs."""
        reduction = _REDUCTIONS[reduce_options.reduceOp]
        self._comm.reduce(_only(tensor), reduce_options.root_rank, reduction)

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any
    ) -> None:
        """Gathers the arrays of all ranks in a list."""
        self._comm.all_gather(_only(tensor), _only(tensor_list))

    def broadcast(self, tensor: list[Any], broadcast_options: Any) -> None:
        """Sends the root's array to all ranks."""
        self._comm.broadcast(_only(tensor), broadcast_options.root_rank)

    def reducescatter(
        self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any
    ) -> None:
        """Reduces a list of arrays over all ranks; rank r gets array r."""
        reduction = _REDUCTIONS[reducescatter_options.reduceOp]
        self._comm.reduce_scatter(_only(tensor_list), _only(tensor), reduction)

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """Sends an array to a rank."""
        self._comm.send(_only(tensor), send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """Receives an array from a rank."""
        self._comm.recv(_only(tensor), recv_options.src_rank)


def _only(of_this_rank: list[Any]) -> Any:
    """Returns the one array, or list of arrays, of this rank."""
    if len(of_this_rank) != 1:
        raise UnsupportedError(
            f"expected one array per rank, not {len(of_this_rank)}: unisono has no *_multigpu calls"
        )
    return of_this_rank[0]
