"""Checkpoints of blocks of tensors, through `torch.distributed.checkpoint` (DCP).

A tensor may have other blocks when it is loaded than when it was saved.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from unisono.parallel.checkpoint.checkpoint_folder import (
    begin_checkpoint,
    end_checkpoint,
    from_all,
    newest_checkpoint,
    require_fit,
)
from unisono.parallel.checkpoint.tensor_block import TensorBlock


def save_blocks(
    folder: Path,
    blocks: Sequence[TensorBlock],
    *,
    begun: Path | None = None,
    values: Mapping[str, bytes] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int = 1,
    verify: bool = False,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a checkpoint into a new subfolder. Collective over `group`.

    `begun`: the subfolder, if `begin_checkpoint` has made it. `group`: None for torch's default
    group; without a default group, this process saves alone.

    Several ranks may pass the same block: one of these ranks writes it. `values`: what
    `torch.save` wrote of other values, by name; ranks that pass the same name pass the same value.
    `extra`: values for JSON, equal on all ranks. `keep`: the number of complete checkpoints that
    the folder keeps. `verify`: each rank reads its blocks again and compares every element, before
    the checkpoint counts as complete.

    Raises `ValueError` on all ranks, before a block is written, unless all see the same folder, and
    `OSError` on all ranks if one cannot write, or reads other values.
    """
    path = begun or begin_checkpoint(folder, group)
    write_blocks(blocks, group, values=values, checkpoint_id=path)
    if verify:
        _verify(path, blocks, group)
    end_checkpoint(path, extra or {}, group, keep=keep)


def write_blocks(
    blocks: Sequence[TensorBlock],
    group: dist.ProcessGroup | None = None,
    *,
    values: Mapping[str, bytes] | None = None,
    **where: Any,
) -> None:
    """Writes the blocks and values of all ranks with DCP. Collective.

    `where`: arguments of DCP's `save` that choose the files. Raises `OSError` on all ranks if one
    cannot write.
    """
    held = _held(blocks)
    with _alone_is_meant(), _in_one_line("write"):
        save(
            dict.fromkeys(held),
            planner=_SavePlanner(held, values or {}),
            process_group=group,
            no_dist=not dist.is_initialized(),
            **where,
        )


def _verify(path: Path, blocks: Sequence[TensorBlock], group: dist.ProcessGroup | None) -> None:
    """Compares blocks with what is on disk. Raises `OSError` on all ranks if a value differs."""
    planner = _ComparePlanner(held := _held(blocks))
    _load(path, held, planner, group)
    found = from_all(planner.different, group)
    differs = [f"{name} (rank {rank})" for rank, names in enumerate(found) for name in names]
    if differs:
        raise OSError(
            f"{path}: {', '.join(differs[:3])} differ from what was written; the disk is faulty, "
            "or another program has written there; the checkpoint does not count as complete"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCheckpoint:
    """A complete checkpoint on disk."""

    path: Path
    tensors: Mapping[str, TensorStorageMetadata]
    """Shape and element type of each tensor of the checkpoint, by name."""
    extra: Mapping[str, Any]
    """The values that `save_blocks` received as `extra`."""
    value_names: frozenset[str] = frozenset()
    """The names of the values that `save_blocks` received as `values`."""

    def problems(self, blocks: Sequence[TensorBlock], *, converts: bool = False) -> list[str]:
        """Returns the differences between blocks and the tensors of the checkpoint, one each.

        `converts`: floating-point values may have another type, from which they are converted.
        """
        found = (_problem(each, self.tensors.get(each.name), converts) for each in blocks)
        return list(dict.fromkeys(each for each in found if each))

    def require(self, problems: Sequence[str]) -> None:
        """Raises `ValueError` on all ranks if one of them has problems. Collective.

        The error names the first problems.
        """
        require_fit(self.path, problems)

    def load(self, blocks: Sequence[TensorBlock]) -> None:
        """Fills blocks, which must fit. Collective."""
        held = _held(blocks)
        _load(self.path, held, _LoadPlanner(held))

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns values that `save_blocks` received. Collective; ranks may pass other names."""
        planner = _ValuePlanner(names)
        _load(self.path, names, planner)
        return planner.found


def open_checkpoint(folder: Path) -> BlockCheckpoint:
    """Returns the newest checkpoint of a folder. Collective.

    Raises `ValueError` on all ranks unless each rank finds the same complete checkpoint.
    """
    path, metadata, extra = newest_checkpoint(folder)
    saved = metadata.state_dict_metadata
    return BlockCheckpoint(
        path=path,
        tensors={
            name: each for name, each in saved.items() if isinstance(each, TensorStorageMetadata)
        },
        value_names=frozenset(
            name for name, each in saved.items() if isinstance(each, BytesStorageMetadata)
        ),
        extra=extra,
    )


def _load(
    path: Path,
    names: Iterable[str],
    planner: DefaultLoadPlanner,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Reads what a planner asks for. Raises `OSError` on all ranks if one cannot read."""
    with _alone_is_meant(), _in_one_line("read"):
        load(
            dict.fromkeys(names),
            checkpoint_id=path,
            planner=planner,
            process_group=group,
            no_dist=not dist.is_initialized(),
        )


@contextlib.contextmanager
def _alone_is_meant() -> Iterator[None]:
    """Suppresses torch's warning that a process without a group saves and loads alone.

    With a group, the filters stay: they are those of all threads.
    """
    if dist.is_initialized():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextlib.contextmanager
def _in_one_line(verb: str) -> Iterator[None]:
    """Raises `OSError` in place of DCP's exception, which is no `Exception` and has many lines."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        text = " ".join(str(cause).split())
        raise OSError(
            f"rank {rank} could not {verb} its part of the checkpoint: "
            f"{type(cause).__name__}: {text}"
        ) from error


def _problem(block: TensorBlock, saved: TensorStorageMetadata | None, converts: bool) -> str:
    """Returns the difference between a block's tensor and a saved tensor; "" if there is none."""
    if saved is None:  # tensors without elements are not saved
        return f"has no tensor {block.name!r}" if math.prod(block.shape) else ""
    if tuple(saved.size) != block.shape:
        return f"{block.name}: expected the shape {block.shape}, got {tuple(saved.size)}"
    types = saved.properties.dtype, block.values.dtype
    is_converted = converts and all(each.is_floating_point for each in types)
    if types[0] != types[1] and not is_converted:
        return f"{block.name}: expected {block.values.dtype}, got {saved.properties.dtype}"
    return ""


Held = Mapping[str, Mapping[torch.Size, TensorBlock]]
"""Blocks of a rank, by name and then by the index of the block's first element."""


def _held(blocks: Sequence[TensorBlock]) -> Held:
    """Returns blocks by name and place, without those that have no elements."""
    found: dict[str, dict[torch.Size, TensorBlock]] = {}
    for block in blocks:
        if block.values.numel():
            found.setdefault(block.name, {})[torch.Size(block.start)] = block
    return found


def _chunk(start: torch.Size, block: TensorBlock) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=start, sizes=block.values.shape)


def _find(held: Held, index: MetadataIndex) -> torch.Tensor:
    assert index.offset is not None  # set by both planners, to tell the blocks of a tensor apart
    return held[index.fqn][index.offset].values


class _SavePlanner(DefaultSavePlanner):
    """Plans to write what this rank has. DCP drops what another rank writes."""

    def __init__(self, held: Held, values: Mapping[str, bytes]) -> None:
        super().__init__(flatten_state_dict=False)
        self._held, self._values = held, values

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, start),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=_chunk(start, block),
                        properties=TensorProperties.create_from_tensor(block.values),
                        size=torch.Size(block.shape),
                    ),
                )
                for name, blocks in self._held.items()
                for start, block in blocks.items()
            ]
            + [
                WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
                for name in self._values
            ]
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._values[write_item.index.fqn])
        return super().resolve_data(write_item)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return _find(self._held, index)


class _LoadPlanner(DefaultLoadPlanner):
    """Plans to read from each saved block the elements that this rank's blocks contain."""

    def __init__(self, held: Held) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._held = held

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None  # set by `set_up_planner`, which DCP calls first
        saved = self.metadata.state_dict_metadata
        items: list[ReadItem] = []
        for name, blocks in self._held.items():
            chunks = [_chunk(start, block) for start, block in blocks.items()]
            tensor = cast(TensorStorageMetadata, saved[name])
            items += create_read_items_for_chunk_list(name, tensor, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return _find(self._held, index)


class _ComparePlanner(_LoadPlanner):
    """Reads each block into an array of its own, and compares it with the block."""

    def __init__(self, held: Held) -> None:
        super().__init__(held)
        self.different: list[str] = []
        """The names of tensors that differ, NaN being equal to itself."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pair = (super().resolve_tensor(read_item), tensor)
        same = torch.equal(*(each.reshape(-1).view(torch.uint8) for each in pair))
        if not same and read_item.dest_index.fqn not in self.different:
            self.different.append(read_item.dest_index.fqn)


class _ValuePlanner(DefaultLoadPlanner):
    """Plans to read whole values, without running code that a file may contain."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._names = names
        self.found: dict[str, Any] = {}

    def create_local_plan(self) -> LoadPlan:
        whole = torch.Size((0,))
        return LoadPlan(
            [
                ReadItem(
                    type=LoadItemType.BYTE_IO,
                    dest_index=MetadataIndex(name),
                    dest_offsets=whole,
                    storage_index=MetadataIndex(name),
                    storage_offsets=whole,
                    lengths=whole,
                )
                for name in self._names
            ]
        )

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
