"""Passes of a model on a part of each sequence, without changes to the model (`cp`).

A rank computes some positions of each sequence. The model runs as if it had the whole sequence:
`DividedPositions` watches its calls of torch, and knows which tensors are divided by positions, and
in which dimension. It reports the shapes of whole sequences, gives each function the parts that
belong together, computes attention over the whole sequence, and refuses functions that would
combine positions in another way. So positions, masks and shifted labels are those of one process.
"""

from unisono.parallel.positions.divided_positions import DividedPositions, Placed
from unisono.parallel.positions.sequence_part import (
    Placement,
    SequencePart,
    place,
    placement_of,
    sequence_length,
)

__all__ = [
    "DividedPositions",
    "Placed",
    "Placement",
    "SequencePart",
    "place",
    "placement_of",
    "sequence_length",
]
