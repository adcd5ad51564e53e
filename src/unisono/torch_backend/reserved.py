"""Replacements for functions that torch.distributed reserves for its own backends.

`dist.monitored_barrier` requires the backend named gloo, and `dist.split_group` a group bound to an
accelerator; torch checks this before it calls the group. `dist.shrink_group` requires a C++
backend, which a Python group does not have. The replacements work on CPU groups of this backend.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from unisono.errors import UnsupportedError
from unisono.torch_backend.private import make_default, register_group
from unisono.torch_backend.process_group import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["monitored_barrier", "shrink_group", "split_group"]


def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Waits for all ranks like `dist.monitored_barrier`; the error names the missing ranks.

    Raises `CollectiveTimeoutError` on every rank that arrived. The error names all missing ranks,
    whatever `wait_all_ranks` is. Ranks outside the group return at once.

    >>> dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
    >>> monitored_barrier(timeout=timedelta(seconds=10))
    >>> dist.destroy_process_group()
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    _ours(group, "monitored_barrier").monitored_barrier(timeout, wait_all_ranks)


def split_group(
    parent: Any = None,
    split_ranks: Sequence[Sequence[int]] = (),
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> Any:
    """Makes the groups of `split_ranks` like `dist.split_group`; returns this rank's group, or
    None.

    `split_ranks` contains ranks of `parent` (None: the default group). If the group also serves
    other devices, all ranks of `parent` must call this; otherwise the ranks of one subgroup
    suffice. The result is an ordinary torch group: `dist.destroy_process_group` accepts it. Raises
    `ValueError` for a subgroup that is empty or names a rank twice.

    >>> dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
    >>> dist.get_process_group_ranks(split_group(split_ranks=[[0]]))
    [0]
    >>> dist.destroy_process_group()
    """
    parent = _ours(parent, "split_group")
    rank = dist.get_rank(parent)
    for ranks in split_ranks:
        if len(set(ranks)) != len(ranks) or not ranks:
            raise ValueError(f"split_ranks: expected one or more distinct ranks, not {list(ranks)}")
    if not split_ranks:
        return None
    part = next((ranks for ranks in split_ranks if rank in ranks), split_ranks[0])
    group = parent.split_group(sorted(part), timeout, group_desc=group_desc)
    if group is not None:
        backend, served = dist.get_backend(parent), dist.get_backend_config(parent)
        register_group(group, backend, served, group.global_ranks)
    return group


def shrink_group(
    ranks_to_exclude: Sequence[int] = (), group: Any = None, timeout: timedelta | None = None
) -> Any:
    """Makes a group of the living ranks in the old order, like `dist.shrink_group`.

    Unlike torch's function, it detects lost ranks itself. It excludes `ranks_to_exclude` and every
    rank that has died or does not call within `timeout` (default: the group's timeout). It works
    after any failure, and is collective over the ranks that are left. Over several hosts
    `ranks_to_exclude` also asserts that these ranks have ended. A minority of the ranks can only
    continue with this assertion, which must be true. See `Communicator.shrink`.

    As in torch, shrinking the default group (None) makes the result the default group, renumbers
    the global ranks, and destroys all other groups. Models wrapped by DDP or FSDP and device meshes
    belong to the old groups: create them again. `dist.new_group` afterwards needs a store that is
    still alive. Torchrun's store stays alive; a store inside rank 0 ends with that rank.

    >>> dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
    >>> shrink_group().size(), dist.get_world_size()
    (1, 1)
    >>> dist.destroy_process_group()
    """
    parent = _ours(group, "shrink_group")
    backend, served = dist.get_backend(parent), dist.get_backend_config(parent)
    shrunk = parent.shrink_group(ranks_to_exclude, timeout)
    if parent is not dist.group.WORLD:
        register_group(shrunk, backend, served, shrunk.global_ranks)
        return shrunk
    dist.destroy_process_group()
    shrunk.global_ranks = list(range(shrunk.size()))
    register_group(shrunk, backend, served, shrunk.global_ranks)
    make_default(shrunk)
    return shrunk


def _ours(group: Any, what: str) -> ProcessGroup:
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, ProcessGroup):
        raise UnsupportedError(
            f"expected a group of unisono, not {group}: call dist.{what} instead"
        )
    return group
