"""The checks of whole numbers and switches that a user states."""

from __future__ import annotations

import operator
from typing import Any

_BOOLEANS = ("bool", "bool_")


def whole_number(name: str, value: Any, *, least: int = 1) -> int:
    """Returns a stated whole number as an `int`. Integers of NumPy are accepted.

    Raises ValueError for other types, for numbers below `least`, and for True and False.

    >>> whole_number("dp", 64.0)
    Traceback (most recent call last):
    ValueError: dp must be a whole number, not 64.0; 64 is
    """
    if type(value) is not int:
        value = _as_int(name, value)
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return int(value)


def switch(name: str, value: Any) -> bool:
    """Returns a stated True or False. 1 and 0 mean the same.

    Raises ValueError for other values, such as texts.

    >>> switch("tied", "false")
    Traceback (most recent call last):
    ValueError: tied must be True or False, not 'false'
    """
    try:  # NumPy's booleans are no integers.
        number = operator.index(bool(value) if type(value).__name__ in _BOOLEANS else value)
    except TypeError:
        number = -1
    if number not in (0, 1):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    return number == 1


def _as_int(name: str, value: Any) -> int:
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ValueError(f"{name} must be a whole number, not {value!r}{_hint(value)}")


def _hint(value: Any) -> str:
    """Returns what would be right, if the value is another spelling of a whole number."""
    if isinstance(value, (bool, bytes)):
        return ""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return ""
    return f"; {int(number)} is" if number.is_integer() else ""
