"""Pairs of a value and an index, for reductions that return the position of an extremum."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unisono.errors import UnsupportedError

_INDEX: dict[str, type[np.integer[Any]]] = {
    "float32": np.int32,
    "float64": np.int64,
    "int32": np.int32,
    "int64": np.int64,
}


def pairs(values: ArrayLike, index: ArrayLike) -> NDArray[Any]:
    """Makes an array of (value, index) pairs, for `op="minloc"` and `op="maxloc"`.

    `values` are float32, float64, int32 or int64, an array or a CPU tensor. `index` broadcasts to
    their shape: for example the rank, or the position of each element. The result has the fields
    "value" and "index"; the index is an integer of the size of a value. The reductions accept any
    NumPy array of two such fields, with any names.

    Raises `UnsupportedError` for other values, `OverflowError` if an index is too large.

    >>> x = pairs(np.array([2.5, 1.0]), index=3)
    >>> x["value"].tolist(), x["index"].tolist()
    ([2.5, 1.0], [3, 3])
    """
    given = np.asarray(values)
    kind = _INDEX.get(given.dtype.name)
    if kind is None:
        raise UnsupportedError(f"values: expected one of {', '.join(_INDEX)}, not {given.dtype}")
    places = np.asarray(index)
    bounds = np.iinfo(kind)
    if places.dtype.kind not in "iu":
        raise UnsupportedError(f"index: expected integers, not {places.dtype}")
    if places.size and not bounds.min <= int(places.min()) <= int(places.max()) <= bounds.max:
        raise OverflowError(
            f"index: expected numbers that fit {kind.__name__}, for {given.dtype} values"
        )
    result = np.empty(given.shape, [("value", given.dtype.newbyteorder("=")), ("index", kind)])
    result["value"] = given
    result["index"] = places
    return result
