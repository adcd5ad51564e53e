"""Checkpoints of blocks of named tensors, which ranks of any other layout can load."""

from typing import TYPE_CHECKING

from unisono.lazy_names import lazy_names
from unisono.parallel.checkpoint.block_checkpoint import (
    BlockCheckpoint,
    open_checkpoint,
    save_blocks,
)
from unisono.parallel.checkpoint.checkpoint_folder import (
    begin_checkpoint,
    raise_first,
    raise_on_all,
)
from unisono.parallel.checkpoint.pending_save import PendingSave, staged_blocks
from unisono.parallel.checkpoint.stored_value import StoredValue, restored
from unisono.parallel.checkpoint.tensor_block import TensorBlock, flat_range_blocks

if TYPE_CHECKING:
    from unisono.parallel.checkpoint.safetensors_folder import export_blocks, load_safetensors

__all__ = [
    "BlockCheckpoint",
    "PendingSave",
    "StoredValue",
    "TensorBlock",
    "begin_checkpoint",
    "export_blocks",
    "flat_range_blocks",
    "load_safetensors",
    "open_checkpoint",
    "raise_first",
    "raise_on_all",
    "restored",
    "save_blocks",
    "staged_blocks",
]

# safetensors is an optional package
__getattr__ = lazy_names(
    __name__,
    {"unisono.parallel.checkpoint.safetensors_folder": ["export_blocks", "load_safetensors"]},
)
