"""All kinds of blocks."""

from __future__ import annotations

from random_models.block import Block
from random_models.flow_blocks import FLOW_BLOCKS
from random_models.parameter_blocks import PARAMETER_BLOCKS
from random_models.plain_blocks import PLAIN_BLOCKS
from random_models.state_blocks import STATE_BLOCKS
from random_models.written_blocks import WRITTEN_BLOCKS

BLOCKS: dict[str, Block] = (
    PLAIN_BLOCKS | PARAMETER_BLOCKS | STATE_BLOCKS | FLOW_BLOCKS | WRITTEN_BLOCKS
)
