"""The weight of a part's mean loss, as a program states it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class LossWeight:
    """Calls a function of the batch, or of the output and the batch.

    >>> LossWeight(lambda batch: len(batch))(None, [1, 2])
    2
    >>> LossWeight(lambda output, batch: output + len(batch))(3, [1, 2])
    5
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises `ValueError` for a function with another number of arguments."""
        if not callable(function):
            raise ValueError(
                f"weight: expected a function of the batch, or of (output, batch), got {function!r}"
            )
        self._function = function
        self._takes_output = _needed(function) == 2

    @property
    def takes_output(self) -> bool:
        """True for a function of the output and the batch."""
        return self._takes_output

    def __call__(self, output: Any, batch: Any) -> Any:
        """Returns the weight of a part: a number, or a tensor of one number."""
        return self._function(output, batch) if self._takes_output else self._function(batch)


def _needed(function: Callable[..., Any]) -> int:
    """Returns the number of arguments that a function needs."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function written in C
        return 1
    needed = [each for each in parameters if each.kind in _KINDS and each.default is each.empty]
    if len(needed) not in (1, 2):
        raise ValueError(
            "weight: expected a function of the batch, or of (output, batch), got one that needs "
            f"{len(needed)} arguments"
        )
    return len(needed)
