"""Functions and interfaces for a program's own modules that the ranks of a layout divide.

A module with a method `divide(mesh)` is `Divisible`: `cut` keeps this rank's parts of parameters,
and `forward` exchanges activations over the groups of the mesh. A module with a method
`bytes_sent(parts)` is `Exchanging`: reports predict its traffic. `docs/divisible.md` has an
example.
"""

from typing import TYPE_CHECKING

from unisono.lazy_names import lazy_names
from unisono.parallel.context.zigzag import own_positions
from unisono.parallel.divisible.exchanges import (
    copy_to_all,
    gather_copies,
    gather_parts,
    keep_part,
    sum_of_all,
    sum_to_parts,
)
from unisono.parallel.divisible.interfaces import Divisible, Exchanging, MicrobatchPart
from unisono.parallel.divisible.parameter_block import cut, sum_over_tp

if TYPE_CHECKING:
    from unisono.parallel.context import ContextAttention

# The first use of the name imports its module, which imports the interfaces of this folder.
__getattr__ = lazy_names(__name__, {"unisono.parallel.context": ["ContextAttention"]})

__all__ = [
    "ContextAttention",
    "Divisible",
    "Exchanging",
    "MicrobatchPart",
    "copy_to_all",
    "cut",
    "gather_copies",
    "gather_parts",
    "keep_part",
    "own_positions",
    "sum_of_all",
    "sum_over_tp",
    "sum_to_parts",
]
