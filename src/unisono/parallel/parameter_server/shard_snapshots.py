"""Snapshots of shards: files with which another rank takes over a lost server's shard."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_NAME = re.compile(r"(\w+)-shard-(\d+)-step-(\d+)\.pt")
_KEPT = 2


class ShardSnapshots:
    """The snapshots of one run in a folder, which all servers must be able to read.

    The newest two snapshots of each shard are kept. Files are written atomically. Their names
    contain `run`, so snapshots of other runs are not removed.
    """

    def __init__(self, folder: Path | str, run: str) -> None:
        self.folder = Path(folder)
        self._run = run

    def _path(self, shard: int, steps: int) -> Path:
        return self.folder / f"{self._run}-shard-{shard}-step-{steps}.pt"

    def write(self, shard: int, steps: int, saved: Mapping[str, Any]) -> None:
        """Writes the snapshot of a shard after `steps` applied steps, and removes old snapshots."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(shard, steps)
        part = path.with_suffix(f".{os.getpid()}.part")
        with part.open("wb") as file:
            torch.save(dict(saved), file)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
        for old in sorted(self.steps(shard))[:-_KEPT]:
            self._path(shard, old).unlink(missing_ok=True)

    def steps(self, shard: int) -> list[int]:
        """Returns the steps, in order, of which this rank can read a snapshot of a shard."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        mine = (each for each in found if each and each[1] == self._run)
        return sorted(int(each[3]) for each in mine if int(each[2]) == shard)

    def read(self, shard: int, steps: int) -> dict[str, Any]:
        """Returns the saved state of a shard after `steps` applied steps."""
        saved: dict[str, Any] = torch.load(self._path(shard, steps), weights_only=True)
        return saved


def pack_shard(saved: Mapping[str, Any]) -> torch.Tensor:
    """Returns a saved shard as one tensor of bytes, for a message to another rank."""
    file = io.BytesIO()
    torch.save(dict(saved), file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpack_shard(packed: torch.Tensor) -> dict[str, Any]:
    """Returns the saved shard that `pack_shard` packed."""
    saved: dict[str, Any] = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    return saved
