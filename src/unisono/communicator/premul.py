"""Sum of contributions, each of which is first multiplied by its rank's factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import native
from unisono.communicator.arrays import stage
from unisono.errors import UnsupportedError

_KINDS = "biufc"  # booleans, signed and unsigned integers, reals, complex numbers


@dataclass(frozen=True, slots=True)
class PremulSum:
    """A reduction that multiplies each rank's contribution by that rank's `factor`, then sums.

    Ranks may have different factors; a rank does not know the factors of others. The factor is a
    number, or an array that broadcasts to the contribution. The factor is converted to the element
    type, and the product is rounded to this type. For 16- and 8-bit floats, factor, product and sum
    are float32, and only the sum is rounded. Integers need an integer factor, and their products
    wrap.
    """

    factor: Any


def premul_sum(factor: Any) -> PremulSum:
    """Makes a sum that multiplies each rank's contribution by its `factor` (PREMUL_SUM of NCCL and
    torch).

    See `PremulSum`.

    >>> premul_sum(0.5)
    PremulSum(factor=0.5)
    """
    return PremulSum(factor)


def scale(array: Any, factor: Any) -> None:
    """Multiplies the elements of a contiguous array by `factor`, in place.

    Raises `UnsupportedError` for a factor of a wider kind, such as a float factor for integer
    elements, and `ValueError` for a factor whose shape does not fit.

    >>> x = np.array([1, 2, 3], np.int32)
    >>> scale(x, 2)
    >>> x.tolist()
    [2, 4, 6]
    """
    x, by = _as_numpy(array), _as_numpy(factor)
    if _rank_of(by) > _rank_of(x):
        raise UnsupportedError(
            f"premul_sum of {x.dtype} elements needs a factor of their kind, not {by.dtype}"
        )
    with np.errstate(all="ignore"):
        converted = by.astype(x.dtype)
        if by.size == 1 and by.ndim <= x.ndim:
            staged = stage(x, writable=True)
            address = staged.located[0]
            native.scale(staged.dtype, address, address, staged.count, converted.tobytes())
        elif x.dtype.kind == "c":
            _scale_complex(x, converted)
        else:
            np.multiply(x, converted, out=x)


def float_factor(reduction: object) -> float | None:
    """Returns the factor as a float32 value if it is one real number, else None."""
    if not isinstance(reduction, PremulSum):
        return None
    factor = reduction.factor
    if not isinstance(factor, (int, float, np.integer, np.floating)):
        return None
    with np.errstate(over="ignore"):
        return float(np.float32(factor))


def _scale_complex(x: NDArray[Any], by: NDArray[Any]) -> None:
    # NumPy's own complex product is not used: it fuses multiplication and addition in some elements
    # but not in others.
    real = x.real * by.real - x.imag * by.imag
    x.imag = x.real * by.imag + x.imag * by.real
    x.real = real


def _as_numpy(array: Any) -> NDArray[Any]:
    """Returns a NumPy view of a CPU tensor, or any other object as a NumPy array."""
    return np.asarray(array.detach().numpy() if hasattr(array, "data_ptr") else array)


def _rank_of(array: NDArray[Any]) -> int:
    kind = array.dtype.kind.replace("u", "i")
    if kind not in _KINDS:
        raise UnsupportedError(f"premul_sum: expected numbers, not {array.dtype}")
    return _KINDS.index(kind)
