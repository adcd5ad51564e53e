"""Loops inside a test, where a case each would cost more than what it tries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def turn(**values: object) -> Iterator[None]:
    """One turn of a loop: a failure in it is told with these values."""
    try:
        yield
    except BaseException as error:
        error.add_note("in the turn " + ", ".join(f"{name}={v}" for name, v in values.items()))
        raise
