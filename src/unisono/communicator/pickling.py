"""Functions, arguments and results as bytes for another process of the same program."""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from typing import Any


def pack(value: Any, *, by_value: bool = False) -> bytes:
    """What `pickle.loads` makes an equal value of, in another process.

    Functions and classes go by name. What has no name that can be imported, such as a lambda, goes
    by value, as its code; `by_value`: so does whatever `__main__` defines. Arrays and tensors are
    copied. Raises what pickle does where that cannot be.

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
        except Exception:  # pickle raises whatever it meets
            buffer = io.BytesIO()
    import cloudpickle  # most programs do without

    whole = cloudpickle.Pickler(buffer)
    whole.dispatch_table = {**_reducers(ForkingPickler(buffer)), **whole.dispatch_table}
    whole.dump(value)
    return buffer.getvalue()


def _reducers(pickler: Any) -> dict[type, Any]:
    """Those of `multiprocessing`, for its queues and pipes, without torch's: they would lend the
    memory of tensors, which ranks are to have for themselves, and which ends with its owner."""
    table = pickler.dispatch_table
    return {kind: table[kind] for kind in table if kind.__module__.partition(".")[0] != "torch"}
