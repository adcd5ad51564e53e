"""Records of a run's passes, optimizer steps and exchanges in the rank's timeline."""

from __future__ import annotations

import time
from collections.abc import Callable

from unisono.timeline import BACKWARD, FORWARD, OPTIMIZER, EventKind, TimelineWriter

# Plain numbers: to read an enumeration's value takes half as long as to record an event.
_ENDED, _LAUNCHED = int(EventKind.ENDED), int(EventKind.LAUNCHED)
_FUSED, _TRANSFERRED = int(EventKind.FUSED), int(EventKind.TRANSFERRED)


class RunTimeline:
    """The timeline of a run. The exchanges of activations inside of passes belong to their pass."""

    def __init__(self, timeline: TimelineWriter) -> None:
        self._record, self._next_number = timeline.record, timeline.next_number
        self._step, self._passed_ns = 0, 0
        self._moved: list[tuple[int, int]] = []

    @property
    def step(self) -> int:
        """Number of the step in progress, from 1."""
        return self._step

    @step.setter
    def step(self, number: int) -> None:
        self._step = number
        self._moved = []

    def exchanged_s(self) -> tuple[float, float]:
        """Returns the seconds of the step's exchanges after its passes, and during its passes.

        The exchanges are those of gradients, parameters, loss and norm, with their waits for other
        ranks. They are one after the other.
        """
        last = self._passed_ns
        hidden = sum(min(end, last) - begin for begin, end in self._moved if begin < last)
        every = sum(end - begin for begin, end in self._moved)
        return (every - hidden) / 1e9, hidden / 1e9

    def passed(self, kind: str, begin_s: float) -> None:
        """Records a pass that began at `begin_s` by `time.monotonic` and ends now.

        `kind`: that of the pass's `StageTask`; the passes of weights and inputs are backward.
        """
        name = FORWARD if kind == "F" else BACKWARD
        self._passed_ns = time.monotonic_ns()
        self._record(_ENDED, name, self._step, 0, int(begin_s * 1e9))

    def optimizer(self, begin_ns: int) -> None:
        """Records a step of the optimizer that began at `begin_ns` by `time.monotonic_ns`."""
        self._record(_ENDED, OPTIMIZER, self._step, 0, begin_ns)

    def exchange(self, name: str, nbytes: int) -> _Exchange:
        """Records the collectives in the `with` block as one, which moves `nbytes` bytes. Any
        thread may call it."""
        number = self._next_number()
        self._record(_LAUNCHED, name, number)
        self._record(_FUSED, name, number, nbytes)
        return _Exchange(self._record, name, number, self._moved)


class _Exchange:
    """The end of an exchange. A class, since a generator takes three times as long."""

    __slots__ = ("_begin_ns", "_moved", "_name", "_number", "_record")

    def __init__(
        self,
        record: Callable[..., None],
        name: str,
        number: int,
        moved: list[tuple[int, int]],
    ) -> None:
        self._record, self._name, self._number, self._moved = record, name, number, moved
        self._begin_ns = time.monotonic_ns()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            now = time.monotonic_ns()
            self._moved.append((self._begin_ns, now))
            self._record(_TRANSFERRED, self._name, self._number, 1, self._begin_ns, now)
