"""The process groups of a layout's axes, and the bytes sent on each group."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from unisono.communicator import bytes_sent, fail_group
from unisono.parallel.rank_grid import GROUPS, RankGrid
from unisono.planner import Layout
from unisono.torch_backend import (
    Options,
    communicator_of,
    default_communicator,
    forget_meshes,
)

if TYPE_CHECKING:
    from unisono.communicator import Communicator, CommunicatorStats


_SAME_SAMPLES = ("pp", "cp", "tp_depth", "tp_row", "tp_column")
_SUMS = "_sums"


class TrainingMesh:
    """The process groups of a layout: one for each group of `GROUPS` with several ranks.

    Names of `GROUPS` with the same ranks share a process group, under the first name. Construct the
    mesh on all ranks of torch's default group, which must run on the backend "unisono". The groups
    have the timeout of the default group. If the ranks are on several hosts, the groups of `tp`,
    `cp` and `ep` are within hosts where possible; `explain` returns what was possible.
    """

    def __init__(
        self, layout: Layout, *, head_copies: int = 1, overlap: bool | None = None
    ) -> None:
        """Makes all groups. Collective. `head_copies`: see `RankGrid`. `overlap`: sums of gradients
        run while passes run; None: those between hosts.

        Raises `ValueError` if the layout has another number of ranks than the default group.
        """
        world = dist.get_world_size()
        if layout.devices != world:
            raise ValueError(
                f"layout: expected {world} ranks, as the default group has, got dp x tp x pp x cp "
                f"= {layout.dp} x {layout.tp} x {layout.pp} x {layout.cp} = {layout.devices}"
            )
        self.layout = layout
        comm = default_communicator()
        self.hosts = ((*range(world),),) if comm is None else comm.hosts
        """The ranks of each host."""
        self._overlap = overlap
        self.grid = _grid(layout, head_copies, self.hosts)
        self.rank = dist.get_rank()
        self.coordinates: Mapping[str, int] = MappingProxyType(self.grid.coordinates(self.rank))
        """Coordinate of this rank along each axis."""
        self.sequence = 0
        """Number of positions of a sequence on this rank, before sequence parallelism splits them.
        Each step sets this number."""
        self._made: dict[tuple[tuple[int, ...], ...], str] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._sums: dict[str, dist.ProcessGroup] = {}
        for name in GROUPS:
            self._make(name, self.grid.groups(name))
        self.all_ranks = self.make_all_ranks() if world > 1 else None
        """A group of all ranks for the exchanges that end a step; None if there is one rank. These
        exchanges do not use torch's default group, because `fail` ends the groups of the mesh."""
        self.closing: list[Callable[[], None]] = []
        """What `close` calls first, to end the use of other groups."""

    def make_all_ranks(self) -> dist.ProcessGroup:
        """Returns a new group of all ranks, which `fail` and `close` do not end. Collective."""
        comm = default_communicator()
        options = None if comm is None else Options(reproducible=comm.reproducible)
        made = dist.new_group(timeout=_timeout(comm), pg_options=options)
        return cast(dist.ProcessGroup, made)

    def _make(self, name: str, partition: tuple[tuple[int, ...], ...]) -> None:
        if len(partition[0]) == 1:
            return
        before = self._made.setdefault(partition, name)
        if before != name:
            if before in self._groups:
                self._groups[name] = self._groups[before]
            return
        if (made := self._new_group(partition)) is not None:
            self._groups[name] = made

    def _new_group(self, partition: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
        """Returns this rank's new group; None if it is in none. Every rank makes every group, as
        torch requires."""
        timeout, found = _timeout(default_communicator()), None
        for ranks in partition:
            made = dist.new_group(list(ranks), timeout=timeout, **_unsorted(ranks))
            found = made if self.rank in ranks else found
        return cast("dist.ProcessGroup | None", found)

    @property
    def has_overlap(self) -> bool:
        """Sums of gradients over some groups, perhaps of other ranks, run while passes
        run."""
        return any(map(self.overlaps, GROUPS))

    def overlaps(self, name: str) -> bool:
        """Returns True if sums of gradients over the groups of this name run while passes run. With
        ZeRO-2 and 3, torch sums gradients."""
        if self._overlap is not None or self.layout.zero >= 2:
            return bool(self._overlap) and self.layout.zero < 2
        return any(self._host_count(group) > 1 for group in self.grid.groups(name))

    def make_sum_groups(self, names: Collection[str]) -> None:
        """Makes second groups of the same ranks for sums of gradients that run while passes run,
        since modules may have collectives in the first ones. Collective.

        `names`: those of the groups in which this rank sums gradients while passes run.
        """
        if not self.has_overlap:
            return
        for name in sorted({name for found in self.of_all_ranks([*names]) for name in found}):
            partition = self.grid.groups(name)
            first = self._made.get(partition)
            if first is not None and first not in self._sums:
                self._sums[first] = cast(dist.ProcessGroup, self._new_group(partition))

    def _host_count(self, ranks: Sequence[int]) -> int:
        return sum(any(rank in host for rank in ranks) for host in self.hosts)

    def explain(self) -> str:
        """Returns a line for each axis of the layout: whether its groups are within hosts. A last
        line has the order of the ranks, if it is not that of their numbers."""
        lines = []
        for name in ("tp", "cp", "ep", "dp", "pp"):
            groups = self.grid.groups(name)
            if len(groups[0]) > 1:
                across = sum(self._host_count(group) > 1 for group in groups)
                where = "between hosts" if across else "within a host"
                some = f" ({across} of {len(groups)} groups)" if 0 < across < len(groups) else ""
                lines.append(f"{name}: {where}{some}")
        if self.grid.placed != tuple(range(self.grid.size)):
            lines.append("order of the ranks: " + " ".join(map(str, self.grid.placed)))
        return "\n".join(lines)

    def make_tie_group(self, places: Sequence[int]) -> dist.ProcessGroup | None:
        """Returns the process group of the ranks at these places of this rank's pipeline; None if
        this rank has another place. Collective.

        Pipeline stages with the same parameter sum its gradients in this group. `bytes_sent` counts
        the group as `pp`.
        """
        name = "pp_" + "_".join(map(str, places))
        pipelines = self.grid.groups("pp")
        self._make(name, tuple(tuple(each[place] for place in places) for each in pipelines))
        return self._groups.get(name)

    def make_sample_group(self) -> tuple[tuple[int, ...], dist.ProcessGroup | None]:
        """Returns the ranks that process the same samples as this rank, in order, and their process
        group; None for one rank. Collective."""
        name, partition = "samples", self.grid.divided(_SAME_SAMPLES)
        self._make(name, partition)
        return next(each for each in partition if self.rank in each), self._groups.get(name)

    @property
    def logit_axis(self) -> str:
        """The axis of `tp` that splits logits by vocabulary: `tp` itself if it is a line of ranks.
        The other axes of a grid split samples.
        """
        return {"1d": "tp", "3d": "tp_row"}.get(self.layout.tensor, "tp_column")

    def ranks(self, name: str) -> tuple[int, ...]:
        """Returns the ranks of the group of this name that contains this rank, in order."""
        return self.grid.group(self.rank, name)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Returns this rank's process group of this name; None for a group of one rank."""
        self.ranks(name)  # raises ValueError for an unknown name
        return self._groups.get(name)

    def sum_elements(self, count: int, name: str) -> int:
        """Returns the elements that this rank sends to sum `count` elements over a group."""
        ranks = self.ranks(name)
        return sum_elements(count, ranks=len(ranks), rank=ranks.index(self.rank))

    def sum_group(self, name: str) -> dist.ProcessGroup | None:
        """Returns this rank's process group of this name for sums of gradients: that of
        `make_sum_groups`, or else that of `group`. `bytes_sent` counts both under one name."""
        first = self._made.get(self.grid.groups(name), "")
        return self._sums.get(first, self.group(name))

    def counted_as(self, name: str) -> str:
        """Returns the name under which `bytes_sent` counts a group: the first name with the same
        ranks, or `tp` for the groups of its grid."""
        return _axis(self._made.get(self.grid.groups(name), name))

    def device_mesh(self, *names: str) -> DeviceMesh:
        """Returns torch's mesh of these groups, for `fully_shard` and tensor parallelism.

        Each group must have several ranks, and no two groups may share an axis. The fastest group
        comes last.
        """
        groups = [self.group(name) for name in names]
        alone = [name for name, group in zip(names, groups, strict=True) if group is None]
        if alone:
            raise ValueError(f"the group {alone[0]!r} has one rank in {self.layout.text()}")
        held = cast("list[dist.ProcessGroup]", groups)
        return DeviceMesh.from_group(held, "cpu", mesh=self._plane(names), mesh_dim_names=names)

    def _plane(self, names: Sequence[str]) -> torch.Tensor:
        """Returns the array of ranks that these groups span from this rank.

        The array has one dimension for each group.
        """
        ranks = torch.tensor([self.rank])
        for name in names:
            rows = [self.grid.group(int(rank), name) for rank in ranks.flatten()]
            ranks = torch.tensor(rows).reshape(*ranks.shape, -1)
        return ranks.squeeze(0)

    def stats(self) -> dict[str, CommunicatorStats]:
        """Returns this rank's communicator statistics by group, under the group's first name."""
        return {name: comm.stats() for name, comm in self._communicators()}

    def bytes_sent(self) -> dict[str, int]:
        """Returns the bytes that this rank has sent on each group.

        Bytes on `tp_row`, `tp_column` and `tp_depth` count for `tp`, and sums of parameters that
        several pipeline stages share count for `pp`.
        """
        sent: Counter[str] = Counter()
        for name, comm in self._communicators():
            sent[_axis(name)] += bytes_sent(comm)
        return dict(sent)

    def _communicators(self) -> Iterator[tuple[str, Communicator]]:
        """Yields the communicator of each group, with the group's first name."""
        for name in self._made.values():
            if name in self._groups:
                yield name, _communicator(self._groups[name])
        for name, group in self._sums.items():
            yield name + _SUMS, _communicator(group)

    def fail(self, error: Exception) -> None:
        """Ends all calls of the mesh's groups on all ranks with an error, now and later. The
        default group still works.

        Errors that are no errors of a communicator reach other ranks as `AbortedError`.
        """
        groups = {*self._groups.values(), *self._sums.values(), self.all_ranks} - {None}
        for group in groups:
            fail_group(_communicator(cast(dist.ProcessGroup, group)), error)
        forget_meshes()  # a new mesh of the same ranks must not use these groups

    def of_all_ranks(self, own: object) -> list[Any]:
        """Returns the objects of all ranks, by rank. Collective. Fails if `fail` has been called on
        a rank.
        """
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own, group=self.all_ranks)
        return found

    def close(self) -> None:
        """Destroys the groups. Call on all ranks."""
        for end in self.closing:
            end()
        self.closing.clear()
        if self.all_ranks is not None:
            dist.destroy_process_group(self.all_ranks)
            self.all_ranks = None
        first_names = [name for name in self._made.values() if name in self._groups]
        for group in [*map(self._groups.__getitem__, first_names), *self._sums.values()]:
            dist.destroy_process_group(group)
        self._groups.clear()
        self._sums.clear()
        self._made.clear()
        forget_meshes()


def sum_elements(count: int, *, ranks: int, rank: int) -> int:
    """Returns the elements that a rank sends to sum `count` elements over the ranks.

    A rank sends all elements except its share, then its share to every other rank. Shares differ by
    at most one element; the first ranks have the longer shares.

    >>> [sum_elements(4, ranks=3, rank=rank) for rank in range(3)]
    [6, 5, 5]
    """
    share = count // ranks + (rank < count % ranks)
    return count + (ranks - 2) * share


def _timeout(comm: Communicator | None) -> timedelta | None:
    """Returns the timeout of the default group, which `new_group` alone does not use."""
    return None if comm is None else timedelta(seconds=comm.timeout_s)


def _axis(name: str) -> str:
    axis, _, _ = name.partition("_")
    return axis if axis in ("tp", "pp") else name.removesuffix(_SUMS)


def _grid(layout: Layout, head_copies: int, hosts: Sequence[Sequence[int]]) -> RankGrid:
    """Returns the grid of a layout on these hosts, as far as this torch can make its groups."""
    placed = RankGrid(layout, head_copies=head_copies, hosts=hosts)
    groups = (group for name in GROUPS for group in placed.groups(name))
    if any(_unsorted(group) for group in groups) and not _can_be_unsorted():
        return RankGrid(layout, head_copies=head_copies)
    return placed


def _unsorted(ranks: Sequence[int]) -> dict[str, Any]:
    """Returns the argument of `new_group` that keeps the order of these ranks."""
    return {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}


def _can_be_unsorted() -> bool:
    """Returns True if torch makes groups of ranks in any order, as 2.13 does."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def _communicator(group: dist.ProcessGroup) -> Communicator:
    found = communicator_of(group)
    if found is None:
        raise ValueError("counts need groups of the backend unisono: init_process_group('unisono')")
    return cast("Communicator", found)
