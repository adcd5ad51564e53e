"""Records of a run's passes, optimizer steps and exchanges in the rank's timeline."""

from __future__ import annotations

import time
from collections.abc import Callable

from unisono.timeline import BACKWARD, FORWARD, OPTIMIZER, EventKind, TimelineWriter

# Plain numbers: to read an enumeration's value takes half as long as to record an event.
_ENDED, _LAUNCHED = int(EventKind.ENDED), int(EventKind.LAUNCHED)
_FUSED, _TRANSFERRED = int(EventKind.FUSED), int(EventKind.TRANSFERRED)


class RunTimeline:
    """The timeline of a run. The exchanges inside of passes belong to their pass."""

    def __init__(self, timeline: TimelineWriter) -> None:
        self._record, self._next_number = timeline.record, timeline.next_number
        self.step = 0
        """Number of the step in progress, from 1."""

    def passed(self, kind: str, begin_s: float) -> None:
        """Records a pass that began at `begin_s` by `time.monotonic` and ends now.

        `kind`: that of the pass's `StageTask`; the passes of weights and inputs are backward.
        """
        name = FORWARD if kind == "F" else BACKWARD
        self._record(_ENDED, name, self.step, 0, int(begin_s * 1e9))

    def optimizer(self, begin_ns: int) -> None:
        """Records a step of the optimizer that began at `begin_ns` by `time.monotonic_ns`."""
        self._record(_ENDED, OPTIMIZER, self.step, 0, begin_ns)

    def exchange(self, name: str, nbytes: int) -> _Exchange:
        """Records the collectives in the `with` block as one, which moves `nbytes` bytes."""
        number = self._next_number()
        self._record(_LAUNCHED, name, number)
        self._record(_FUSED, name, number, nbytes)
        return _Exchange(self._record, name, number)


class _Exchange:
    """The end of an exchange. A class, since a generator takes three times as long."""

    __slots__ = ("_begin_ns", "_name", "_number", "_record")

    def __init__(self, record: Callable[..., None], name: str, number: int) -> None:
        self._record, self._name, self._number = record, name, number
        self._begin_ns = time.monotonic_ns()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            now = time.monotonic_ns()
            self._record(_TRANSFERRED, self._name, self._number, 1, self._begin_ns, now)
