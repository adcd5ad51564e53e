"""The check of numbers that must be positive."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any


def require_positive(values: Mapping[str, Any]) -> None:
    """Raises ValueError with the name of the first value that is not a positive number.

    >>> require_positive({"tokens": 1e9, "price": 0.0})
    Traceback (most recent call last):
    ValueError: price must be positive, not 0.0
    """
    for name, value in values.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not value > 0:
            raise ValueError(f"{name} must be positive, not {value!r}")
