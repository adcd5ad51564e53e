"""The sum of contributions that each rank multiplies by a factor of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import native
from unisono.communicator.arrays import stage
from unisono.errors import UnsupportedError

_KINDS = "biufc"  # booleans, integers (of either sign), real, complex


@dataclass(frozen=True, slots=True)
class PremulSum:
    """A reduction: each rank's contribution is multiplied by its own `factor`, then summed.

    The peers neither need nor see the factor, which may differ from rank to rank. It is a number,
    or an array that broadcasts to the contribution; it is converted to the type of the elements,
    in which the product is rounded as any product of that type. Of 16- and 8-bit floats, factor,
    product and sum are float32, and only the sum is rounded. Integers need an integer factor, and
    wrap.
    """

    factor: Any


def premul_sum(factor: Any) -> PremulSum:
    """The sum of all contributions, each multiplied by the `factor` its rank gives (NCCL's and
    torch's PREMUL_SUM). See `PremulSum`.

    >>> premul_sum(0.5)
    PremulSum(factor=0.5)
    """
    return PremulSum(factor)


def scale(array: Any, factor: Any) -> None:
    """Multiplies contiguous elements in place. Raises `UnsupportedError`, or `ValueError` for a
    factor whose shape does not fit.

    >>> x = np.array([1, 2, 3], np.int32)
    >>> scale(x, 2)
    >>> x.tolist()
    [2, 4, 6]
    """
    x, by = _as_numpy(array), _as_numpy(factor)
    if _rank_of(by) > _rank_of(x):
        raise UnsupportedError(f"premul_sum of {x.dtype} elements cannot take a {by.dtype} factor")
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
    """The factor of float32 elements, if it is one number."""
    if not isinstance(reduction, PremulSum):
        return None
    factor = reduction.factor
    if not isinstance(factor, (int, float, np.integer, np.floating)):
        return None
    with np.errstate(over="ignore"):
        return float(np.float32(factor))


def _scale_complex(x: NDArray[Any], by: NDArray[Any]) -> None:
    # NumPy fuses multiplications and additions in some elements of an array and not in others.
    real = x.real * by.real - x.imag * by.imag
    x.imag = x.real * by.imag + x.imag * by.real
    x.real = real


def _as_numpy(array: Any) -> NDArray[Any]:
    """The memory of a CPU tensor as a NumPy array; anything else as NumPy takes it."""
    return np.asarray(array.detach().numpy() if hasattr(array, "data_ptr") else array)


def _rank_of(array: NDArray[Any]) -> int:
    kind = array.dtype.kind.replace("u", "i")
    if kind not in _KINDS:
        raise UnsupportedError(f"premul_sum needs numbers, not {array.dtype}")
    return _KINDS.index(kind)
