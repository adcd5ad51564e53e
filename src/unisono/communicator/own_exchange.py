"""Exchange of numbers that the library makes for itself, such as before a `split`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unisono.communicator.engine import Call, Engine


def exchange_of(engine: Engine, made_for: str, numbers: Sequence[int]) -> Call:
    """Returns the call that gathers equally many numbers (int64) of each rank on all ranks.

    The result has a row for each rank. `made_for` is the method that makes the call, for errors.
    """
    engine.refuse_in_batch(made_for)
    mine = np.array(numbers, np.int64)
    table = np.empty((engine.size, mine.size), np.int64)
    inputs = [(mine.ctypes.data, mine.nbytes)]
    outputs = [(row.ctypes.data, row.nbytes) for row in table]
    prepared = engine.call_cache.own_exchange(made_for, mine.nbytes)
    return Call(prepared, inputs, outputs, table, (mine, table))
