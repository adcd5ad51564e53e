"""Results of calls of CUDA's driver and compiler."""

from __future__ import annotations

from typing import Any

from unisono.errors import UnsupportedError


def checked(result: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """Returns the results of a call of `cuda.bindings`, without its status.

    Raises `UnsupportedError` with the name of a failure. `what`: a verb and an object, for the
    error's text.

    >>> checked((0, 7), "count devices")
    (7,)
    """
    status, *found = result
    if int(status) != 0:
        raise UnsupportedError(f"cannot {what}: CUDA reports {status.name}")
    return tuple(found)
