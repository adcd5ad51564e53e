"""What the benchmark asks of a library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from numpy.typing import NDArray

from unisono.bench.cases import Case
from unisono.errors import UnsupportedError

Array = NDArray[Any]
Call = Callable[[], object]
Repeat = Callable[[int], object]
"""Performs an operation so many times."""


class Peer(ABC):
    """One rank of a library's world, connected on construction. Used from one thread."""

    rank: int
    moves_data: bool = True
    """Whether x and out are used, and can be verified."""

    @abstractmethod
    def bind(self, case: Case, x: Array, out: Array) -> Call:
        """A function that performs the case's operation once, and returns when it is done here.

        x and out stay the caller's; out has length 0 where the result lands in x. bfloat16 and
        8-bit floats arrive as bit patterns. Raises UnsupportedError.
        """

    def exchange(self, case: Case, x: Array, out: Array) -> Repeat:
        """The same for messages between pairs. Raises UnsupportedError."""
        raise UnsupportedError(f"{type(self).__name__} has no {case.op}")

    def repeat(self, case: Case, x: Array, out: Array) -> Repeat:
        """The case's operation, to be performed any number of times. Raises UnsupportedError."""
        if case.operation.paired:
            return self.exchange(case, x, out)
        return partial(_repeat, self.bind(case, x, out))

    def choose(self, algorithm: str) -> Peer:
        """Serves what is bound from now on by this algorithm. Raises UnsupportedError."""
        raise UnsupportedError(f"{type(self).__name__} has no choice of {algorithm}")

    def close(self) -> None:
        """Leave the world. Collective."""
        return None


def _repeat(call: Call, times: int) -> None:
    for _ in range(times):
        call()
