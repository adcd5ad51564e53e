"""The interface between the benchmark and a library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.bench.cases import Case
from unisono.errors import UnsupportedError

Array = NDArray[Any]
Call = Callable[[], object]
Repeat = Callable[[int], object]
"""A function that performs an operation a given number of times."""


class Puts(ABC):
    """Puts an array to the next rank a given number of times. All ranks make and close it."""

    @abstractmethod
    def __call__(self, times: int) -> None:
        """Returns when all puts of this rank, and those to it, are complete."""

    @abstractmethod
    def store(self) -> None:
        """Copies what the other rank has put to the array of the case."""

    @abstractmethod
    def close(self) -> None:
        """Frees the memory that the other rank writes."""


class Peer(ABC):
    """Driver of a library on one rank. The constructor joins the library's group. Used from one
    thread."""

    rank: int
    _puts: Puts | None = None
    moves_data: bool = True
    """True if operations use x and out, so that results can be verified."""

    @abstractmethod
    def bind(self, case: Case, x: Array, out: Array) -> Call:
        """Returns a function that performs the operation of a case once. The function returns when
        the operation is complete on this rank.

        The caller keeps x and out alive. If the result is written to x, out has length 0. bfloat16
        and 8-bit floats are passed as bit patterns. Raises UnsupportedError.
        """

    def exchange(self, case: Case, x: Array, out: Array) -> Repeat:
        """Returns a function like that of `repeat`, for an operation that sends messages between
        pairs of ranks. Raises UnsupportedError."""
        raise UnsupportedError(f"{type(self).__name__} has no {case.op}")

    def puts(self, case: Case, x: Array, out: Array) -> Puts | None:
        """Returns the puts of a case. None: `bind` decides what the library does for it."""
        return None

    def repeat(self, case: Case, x: Array, out: Array) -> Repeat:
        """Returns a function that performs the operation of a case a given number of times. Raises
        UnsupportedError."""
        if self._puts:
            self._puts.close()
        self._puts = self.puts(case, x, out) if case.op == "put" else None
        if self._puts:
            return self._puts
        if case.operation.paired:
            return self.exchange(case, x, out)
        return partial(_repeat, self.bind(case, x, out))

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Returns an uninitialised array for the operations of a case."""
        return np.empty(count, dtype)

    def rewrite(self, x: Array) -> None:
        """Writes zeros to all elements of the input x, as a program that computes a new input."""
        x.fill(0)

    def load(self) -> None:
        """Copies the arrays of the bound case to the memory that the library sends."""
        return None

    def store(self) -> None:
        """Copies the library's results to the arrays of the bound case."""
        if self._puts:
            self._puts.store()

    def finish(self) -> None:
        """Waits until the calls that were made are complete."""
        return None

    def with_arrays(self, call: Call) -> None:
        """Makes a call on the content of the arrays, which then have its results."""
        self.load()
        call()
        self.finish()
        self.store()

    def choose(self, algorithm: str) -> Peer:
        """Selects the algorithm for cases that are bound later. Raises UnsupportedError."""
        raise UnsupportedError(f"{type(self).__name__} cannot select algorithm {algorithm}")

    def close(self) -> None:
        """Leaves the group. All ranks must call this function."""
        return None


def _repeat(call: Call, times: int) -> None:
    for _ in range(times):
        call()
