"""Pickles functions, arguments and results for another process of the same program."""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from typing import Any


def pack(value: Any, *, by_value: bool = False) -> bytes:
    """Pickles a value so that `pickle.loads` in another process returns an equal value.

    Functions and classes are pickled by name. Objects without an importable name, such as lambdas,
    are pickled by value, with their code. With `by_value`, the same applies to everything that
    `__main__` defines. Arrays and tensors are copied. Raises pickle's errors.

    >>> import pickle
    >>> pickle.loads(pack(lambda: 3))()
    3
    """
    buffer = io.BytesIO()
    if not by_value:
        named = ForkingPickler(buffer)
        named.dispatch_table = _reducers(named)
        try:
            named.dump(value)
            return buffer.getvalue()
        except Exception:  # pickling can raise any error
            buffer = io.BytesIO()
    import cloudpickle  # imported late, since most programs do not need it

    whole = cloudpickle.Pickler(buffer)
    whole.dispatch_table = {**_reducers(ForkingPickler(buffer)), **whole.dispatch_table}
    whole.dump(value)
    return buffer.getvalue()


def _reducers(pickler: Any) -> dict[type, Any]:
    """Returns `multiprocessing`'s pickling functions by type, without those for torch's types.

    Torch's functions share a tensor's memory, which lives only as long as the process that owns the
    tensor. Ranks need copies.
    """
    table = pickler.dispatch_table
    return {kind: table[kind] for kind in table if kind.__module__.partition(".")[0] != "torch"}
