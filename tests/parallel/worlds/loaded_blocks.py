"""Blocks that are filled from the newest checkpoint of a folder, if they fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.parallel.checkpoint import TensorBlock, open_checkpoint


def load_blocks(folder: Path, blocks: Sequence[TensorBlock]) -> dict[str, Any]:
    """Fills the blocks; returns the values that `save_blocks` received as `extra`."""
    checkpoint = open_checkpoint(folder)
    checkpoint.require(checkpoint.problems(blocks))
    checkpoint.load(blocks)
    return dict(checkpoint.extra)
