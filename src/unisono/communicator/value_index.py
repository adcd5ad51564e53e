"""Values with the place they come from, for reductions that tell where the extreme was."""

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
    """An array of (value, index) pairs, for `op="minloc"` and `op="maxloc"`.

    `values` are float32, float64, int32 or int64 (also a CPU tensor's); `index` broadcasts to
    their shape: the rank, or the elements' own numbers. The fields of the result are "value" and
    "index", an integer of the size of a value. Any NumPy array of two such fields does, whatever
    their names.

    Raises `UnsupportedError` for other values, `OverflowError` for an index too large.

    >>> x = pairs(np.array([2.5, 1.0]), index=3)
    >>> x["value"].tolist(), x["index"].tolist()
    ([2.5, 1.0], [3, 3])
    """
    given = np.asarray(values)
    kind = _INDEX.get(given.dtype.name)
    if kind is None:
        raise UnsupportedError(f"pairs hold values of {', '.join(_INDEX)}, not {given.dtype}")
    places = np.asarray(index)
    bounds = np.iinfo(kind)
    if places.dtype.kind not in "iu":
        raise UnsupportedError(f"an index is an integer, not {places.dtype}")
    if places.size and not bounds.min <= int(places.min()) <= int(places.max()) <= bounds.max:
        raise OverflowError(f"an index of {given.dtype} values must fit {kind.__name__}")
    result = np.empty(given.shape, [("value", given.dtype.newbyteorder("=")), ("index", kind)])
    result["value"] = given
    result["index"] = places
    return result
