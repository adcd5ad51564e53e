"""The process groups of a layout's axes, and the bytes sent on each group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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


class TrainingMesh:
    """The process groups of a layout: one for each group of `GROUPS` with several ranks.

    Names of `GROUPS` with the same ranks share a process group, under the first name. Construct the
    mesh on all ranks of torch's default group, which must run on the backend "unisono". The groups
    have the timeout of the default group.
    """

    def __init__(self, layout: Layout, *, head_copies: int = 1) -> None:
        """Makes all groups. Collective. `head_copies`: see `RankGrid`.

        Raises `ValueError` if the layout has another number of ranks than the default group.
        """
        world = dist.get_world_size()
        if layout.devices != world:
            raise ValueError(
                f"layout: expected {world} ranks, as the default group has, got dp x tp x pp x cp "
                f"= {layout.dp} x {layout.tp} x {layout.pp} x {layout.cp} = {layout.devices}"
            )
        self.layout = layout
        self.grid = RankGrid(layout, head_copies=head_copies)
        self.rank = dist.get_rank()
        self.coordinates: Mapping[str, int] = MappingProxyType(self.grid.coordinates(self.rank))
        """Coordinate of this rank along each axis."""
        self.sequence = 0
        """Number of positions of a sequence on this rank, before sequence parallelism splits them.
        Each step sets this number."""
        self._made: dict[tuple[tuple[int, ...], ...], str] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}
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
        timeout = _timeout(default_communicator())
        for ranks in partition:  # every rank makes every group, as torch requires
            group = dist.new_group(list(ranks), timeout=timeout)
            if self.rank in ranks:
                self._groups[name] = cast(dist.ProcessGroup, group)

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

    def fail(self, error: Exception) -> None:
        """Ends all calls of the mesh's groups on all ranks with an error, now and later. The
        default group still works.

        Errors that are no errors of a communicator reach other ranks as `AbortedError`.
        """
        groups = {*self._groups.values(), self.all_ranks} - {None}
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
        for name in self._made.values():
            if name in self._groups:
                dist.destroy_process_group(self._groups[name])
        self._groups.clear()
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
    return axis if axis in ("tp", "pp") else name


def _communicator(group: dist.ProcessGroup) -> Communicator:
    found = communicator_of(group)
    if found is None:
        raise ValueError("counts need groups of the backend unisono: init_process_group('unisono')")
    return cast("Communicator", found)
