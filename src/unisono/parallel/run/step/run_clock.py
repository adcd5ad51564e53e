"""The times of a step's passes and exchanges, for reports and in the rank's timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unisono.pipeline import StageTask, TaskSpan
from unisono.timeline import BACKWARD, FORWARD, OPTIMIZER, EventKind, TimelineWriter

# Plain numbers: to read an enumeration's value takes half as long as to record an event.
_ENDED, _LAUNCHED = int(EventKind.ENDED), int(EventKind.LAUNCHED)
_FUSED, _TRANSFERRED = int(EventKind.FUSED), int(EventKind.TRANSFERRED)


class RunClock:
    """Recorder of the passes, exchanges and optimizer steps of a run.

    The exchanges of activations inside of passes belong to their pass.
    """

    def __init__(self, timeline: TimelineWriter) -> None:
        self._event, self._next_number = timeline.record, timeline.next_number
        self._step, self._is_apart = 0, False
        self._passes: list[tuple[str, int, int, float, float]] = []
        self._moved: list[tuple[int, int]] = []

    def begin_step(self, number: int) -> None:
        """Begins a step; `number`: from 1."""
        self._step, self._moved = number, []

    def restart(self) -> None:
        """Discards the recorded passes, before those of the next step."""
        self._passes = []

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keeps the passes of the last step, and leaves those inside out of the timeline."""
        passes, self._is_apart = self._passes, True
        try:
            yield
        finally:
            self._passes, self._is_apart = passes, False

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
        return (self._passes[0][-2], self._passes[-1][-1]) if self._passes else (0.0, 0.0)

    @property
    def exchanged_s(self) -> tuple[float, float]:
        """Seconds of the step's exchanges after its passes, and during its passes.

        The exchanges are those of gradients, parameters, loss and norm, with their waits for other
        ranks. They are one after the other.
        """
        last = int(self.span[1] * 1e9)
        hidden = sum(min(end, last) - begin for begin, end in self._moved if begin < last)
        every = sum(end - begin for begin, end in self._moved)
        return (every - hidden) / 1e9, hidden / 1e9

    def record(self, kind: str, microbatch: int, stage: int, begin_s: float) -> None:
        """Records a pass that began at `begin_s` by `time.monotonic` and ends now.

        `kind`: that of the pass's `StageTask`; the passes of weights and inputs are backward. This
        method makes no objects, since a step has many short passes.
        """
        self._passes.append((kind, microbatch, stage, begin_s, time.monotonic()))
        if not self._is_apart:
            name = FORWARD if kind == "F" else BACKWARD
            self._event(_ENDED, name, self._step, 0, int(begin_s * 1e9))

    def optimizer(self, begin_ns: int) -> None:
        """Records a step of the optimizer that began at `begin_ns` by `time.monotonic_ns`."""
        self._event(_ENDED, OPTIMIZER, self._step, 0, begin_ns)

    def exchange(self, name: str, nbytes: int) -> _Exchange:
        """Records the collectives in the `with` block as one, which moves `nbytes` bytes. Any
        thread may call it."""
        number = self._next_number()
        self._event(_LAUNCHED, name, number)
        self._event(_FUSED, name, number, nbytes)
        return _Exchange(self._event, name, number, self._moved)


class _Exchange:
    """The end of an exchange. A class, since a generator takes three times as long."""

    __slots__ = ("_begin_ns", "_event", "_moved", "_name", "_number")

    def __init__(
        self, event: Callable[..., None], name: str, number: int, moved: list[tuple[int, int]]
    ) -> None:
        self._event, self._name, self._number, self._moved = event, name, number, moved
        self._begin_ns = time.monotonic_ns()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            now = time.monotonic_ns()
            self._moved.append((self._begin_ns, now))
            self._event(_TRANSFERRED, self._name, self._number, 1, self._begin_ns, now)
