"""Checkpoints of blocks of named tensors, which ranks of any other layout can load."""

from unisono.parallel.checkpoint.block_checkpoint import load_blocks, save_blocks
from unisono.parallel.checkpoint.tensor_block import TensorBlock, flat_range_blocks

__all__ = ["TensorBlock", "flat_range_blocks", "load_blocks", "save_blocks"]
