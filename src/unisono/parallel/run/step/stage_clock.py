"""The times of a step's passes and exchanges, for reports and in the rank's timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unisono.pipeline import StageTask, TaskSpan
from unisono.timeline import BACKWARD, FORWARD, OPTIMIZER, EventKind, TimelineWriter


class StageClock:
    """Recorder of the times of a step's forward and backward passes."""

    def __init__(self) -> None:
        self._passes: list[tuple[str, int, int, float, float]] = []
        self.tell: Callable[[str, float], None] | None = None
        """Function that gets the kind and the beginning of each pass at the end of the pass."""

    @property
    def spans(self) -> list[TaskSpan]:
        """The passes of the step, by the host's monotonic clock."""
        return [
            TaskSpan(StageTask(kind, microbatch, stage), begin_s, end_s)
            for kind, microbatch, stage, begin_s, end_s in self._passes
        ]

    @property
    def busy_s(self) -> float:
        """Seconds in forward and backward passes."""
        return sum(end_s - begin_s for *_, begin_s, end_s in self._passes)

    @property
    def span(self) -> tuple[float, float]:
        """Beginning of the first pass and end of the last pass; (0, 0) without passes."""
        if not self._passes:
            return 0.0, 0.0
        return self._passes[0][-2], self._passes[-1][-1]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keeps the passes of the last step, and tells nobody of those inside."""
        passes, tell = self._passes, self.tell
        self.tell = None
        try:
            yield
        finally:
            self._passes, self.tell = passes, tell

    def restart(self) -> None:
        """Discards the recorded passes, before the next step."""
        self._passes = []

    def record(self, kind: str, microbatch: int, stage: int, begin_s: float) -> None:
        """Records a pass that began at `begin_s` by `time.monotonic` and ends now.

        `kind`: that of the pass's `StageTask`. This method makes no objects, since a step has many
        short passes.
        """
        self._passes.append((kind, microbatch, stage, begin_s, time.monotonic()))
        if self.tell is not None:
            self.tell(kind, begin_s)


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
