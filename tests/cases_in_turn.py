"""Loops over cases inside one test, for cases that are too short for a test of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def turn(**values: object) -> Iterator[None]:
    """Runs one iteration of a loop over cases. If the iteration fails, the error lists these
    values.
    """
    try:
        yield
    except BaseException as error:
        error.add_note("in the case " + ", ".join(f"{name}={v}" for name, v in values.items()))
        raise
