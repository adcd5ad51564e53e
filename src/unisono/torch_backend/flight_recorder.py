"""Dumps of the most recent calls of this process's groups, in the format of torch's flight
recorder.

`TORCH_FR_BUFFER_SIZE` enables recording; its value is the number of calls to keep for each group. A
group that ends with pending or failed calls writes a dump. `dump()` writes a dump at any time.
Torch's own tool reads the files of all ranks in one folder, and lists the calls of each rank:

    TORCH_FR_BUFFER_SIZE=2000 TORCH_FR_DUMP_TEMP_FILE=/tmp/fr/rank_ torchrun ...
    torchfrtrace /tmp/fr --prefix rank_
"""

from __future__ import annotations

import logging
import math
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from unisono import config
from unisono.torch_backend.private import DTYPE_NAMES, groups_of_torch, readable_stacks

if TYPE_CHECKING:
    from unisono.torch_backend.history import RecordedCall

_log = logging.getLogger(__name__)

# The version of the format that torch 2.13 writes.
_VERSION = "2.10"
# The tool (torchfrtrace) accepts only names of torch's own backends.
_BACKEND_IN_DUMPS = "gloo"

_Tensors = list[tuple[list[int], torch.dtype]]


def dump(path: str | Path | None = None) -> Path:
    """Writes the most recent calls of all groups of this process to a file; returns its path.

    `path` defaults to `TORCH_FR_DUMP_TEMP_FILE` followed by the rank; `torchfrtrace` expects this
    name. Raises `ValueError` if nothing was recorded.
    """
    groups = _recorded_groups()
    if not groups:
        raise ValueError("nothing was recorded: set TORCH_FR_BUFFER_SIZE before the group is made")
    if path is None:
        path = f"{config.flight_recorder().dump_prefix}{dist.get_rank()}"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(_trace(groups)))
    return path


def dump_at_end() -> None:
    """Writes a dump for a group that ends with pending or failed calls. Never raises."""
    try:
        path = dump()
    except (OSError, ValueError):
        _log.warning("could not write a dump of the last calls", exc_info=True)
    else:
        _log.warning("a group was left with unfinished calls; its last calls are in %s", path)


def _recorded_groups() -> list[Any]:
    return [group for group in groups_of_torch() if getattr(group, "history", None) is not None]


def _trace(groups: list[Any]) -> dict[str, Any]:
    calls = [(entry, group) for group in groups for entry in group.history.entries()]
    calls.sort(key=lambda call: call[0].time_ns)
    stacks = readable_stacks([entry.frames for entry, _ in calls])
    entries = [
        _entry(index, entry, group, frames)
        for index, ((entry, group), frames) in enumerate(zip(calls, stacks, strict=True))
    ]
    return {
        "version": _VERSION,
        "comm_lib_version": "",
        "pg_config": {group.group_name: _group(group) for group in groups},
        "pg_status": {group.group_name: _status(group) for group in groups},
        "entries": entries,
    }


def _group(group: Any) -> dict[str, str]:
    return {"name": group.group_name, "desc": group.group_desc, "ranks": str(group.global_ranks)}


def _status(group: Any) -> dict[str, int]:
    collectives = [entry for entry in group.history.entries() if entry.peer is None]
    begun = max((entry.order for entry in collectives), default=0)
    done = max((entry.order for entry in collectives if entry.is_completed), default=0)
    return {
        "last_enqueued_collective": begun,
        "last_started_collective": begun,
        "last_completed_collective": done,
    }


def _entry(
    index: int, entry: RecordedCall, group: Any, frames: list[dict[str, Any]]
) -> dict[str, Any]:
    is_message = entry.name in ("send", "recv")
    return {
        "record_id": index,
        "op_id": entry.order,
        "pg_id": 0,
        "process_group": (group.group_name, group.group_desc),
        "collective_seq_id": 0 if is_message else entry.order,
        "p2p_seq_id": entry.order if is_message else 0,
        "is_p2p": is_message,
        "profiling_name": f"{_BACKEND_IN_DUMPS}:{_name(entry, group.communicator.rank)}",
        "time_created_ns": entry.time_ns,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "state": "completed" if entry.is_completed else "scheduled",
        "retired": entry.is_completed,
        "timeout_ms": int(group.communicator.timeout_s * 1000),
        "input_sizes": _sizes(entry.inputs),
        "input_dtypes": _dtypes(entry.inputs),
        "output_sizes": _sizes(entry.outputs),
        "output_dtypes": _dtypes(entry.outputs),
        "frames": frames,
    }


def _name(entry: RecordedCall, rank: int) -> str:
    peer = -1 if entry.peer is None else entry.peer
    arrow = {"send": f" {rank}->{peer}", "recv": f" {rank}<-{peer}"}.get(entry.name, "")
    return entry.name + arrow


def _sizes(tensors: _Tensors) -> list[list[int]]:
    """Returns one shape, since torch writes a list of tensors as one tensor with one more
    dimension.
    """
    shapes = [shape for shape, _ in tensors]
    if len(shapes) > 1 and all(shape == shapes[0] for shape in shapes):
        return [[len(shapes), *shapes[0]]]
    return [[sum(math.prod(shape) for shape in shapes)]] if len(shapes) > 1 else shapes


def _dtypes(tensors: _Tensors) -> list[str]:
    return sorted({DTYPE_NAMES.get(dtype, str(dtype)) for _, dtype in tensors})
