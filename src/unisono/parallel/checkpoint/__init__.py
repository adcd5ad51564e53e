"""Checkpoints of blocks of named tensors, which ranks of any other layout can load."""

from unisono.parallel.checkpoint.block_checkpoint import (
    BlockCheckpoint,
    load_blocks,
    open_checkpoint,
    save_blocks,
)
from unisono.parallel.checkpoint.tensor_block import TensorBlock, flat_range_blocks

__all__ = [
    "BlockCheckpoint",
    "TensorBlock",
    "flat_range_blocks",
    "load_blocks",
    "open_checkpoint",
    "save_blocks",
]
