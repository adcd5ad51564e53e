"""Write-back: a rank that reduces a chunk writes the result straight into the memory from which it
read the contributions.

So an in-place all_reduce reads each contribution once and writes each result once. Without
write-back, a rank writes its result to its own memory, and every other rank copies it from there.

A rank may overwrite a contribution if no other reduction reads it, and if its owner waits for the
result. `writes_back` finds the schedules in which this holds for all results.
"""

from __future__ import annotations

import numpy as np

from unisono.schedule.collective import Numbers
from unisono.schedule.dataflow import Dataflow
from unisono.schedule.record import Code, Flag, Space, Table
from unisono.schedule.staging import Staging
from unisono.types import Op


def writes_back(flow: Dataflow, staging: Staging) -> bool:
    """Returns true if each rank can write its results into the contributions of the other ranks.

    In such a schedule, ranks read each other's inputs only to reduce them to results, and read each
    other's results only to copy them. A result is copied to exactly the ranks whose inputs it was
    reduced from, and to the place of these inputs.
    """
    if flow.moves.places.schedule.collective.op is not Op.ALL_REDUCE:
        return False
    remote = np.flatnonzero(staging.remote)
    value, into = flow.operands[remote], staging.target[remote]
    given = value < flow.inputs
    uses = np.bincount(flow.operands, minlength=len(flow.rank))
    operands = np.zeros(len(flow.rank), np.int64)
    operands[flow.made] = np.diff(flow.first)
    is_output = np.zeros(len(flow.rank), np.bool_)
    is_output[flow.outputs] = True

    reduced, copied = into[given], into[~given]
    single_reader = (uses[value[given]] == 1) & ~is_output[value[given]]
    only_copied = is_output[copied] & (operands[copied] == 1) & (uses[copied] == 0)
    if not (len(copied) and single_reader.all() and only_copied.all()):
        return False
    read_from = _sorted_pairs(reduced, flow.place[value[given]])
    written_to = _sorted_pairs(value[~given], flow.place[copied])
    return np.array_equal(read_from, written_to)


def _sorted_pairs(result: Numbers, place: Numbers) -> Numbers:
    pairs: Numbers = np.unique(np.stack((result, place)), axis=1)
    return pairs


def write_back(table: Table) -> Table:
    """Changes the records of a rank from single copy to write-back: reductions write their result
    to their operands, and nobody copies it. The flag of a SHARE tells the owner of an operand.
    """
    pulled = (table["code"] == Code.COPY) & (table["src"] & 0xFF == Space.SHARED)
    kept: Table = table[~pulled]
    result = (kept["code"] == Code.REDUCE) & (kept["flags"] & Flag.SHARES != 0)
    kept["flags"][result] ^= np.uint16(Flag.SHARES | Flag.WRITES_BACK)
    kept["dst2"][result] = 0
    kept["flags"][kept["code"] == Code.SHARE] |= np.uint16(Flag.WRITES_BACK)
    return kept
