"""Checkpoints of blocks of named tensors, written by one division into ranks and read by any."""

from unisono.parallel.checkpoint.block_checkpoint import load_blocks, save_blocks
from unisono.parallel.checkpoint.tensor_block import TensorBlock, flat_range_blocks

__all__ = ["TensorBlock", "flat_range_blocks", "load_blocks", "save_blocks"]
