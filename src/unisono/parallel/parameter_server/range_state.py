"""The state machine of one range on its server: it takes pushes and returns actions.

The state machine neither communicates nor reads gradients. With a bound on the staleness, it
implements stale synchronous parallel (Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", NIPS 2013).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply(Generic[T]):
    """The action of applying gradients, given as (worker, gradient) in the order of workers.

    `delay`: number of other workers' updates between this update and the read of the values from
    which its gradient was computed; 0 if synchronous.
    """

    step: int
    gradients: tuple[tuple[int, T], ...]
    delay: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The action of sending the values to a worker that has pushed `step`, for its next step.

    `missed`: number of other workers' gradients, of steps up to `step`, that the values do not
    contain yet. `early`: number of other workers' gradients, of later steps, that they already
    contain.
    """

    worker: int
    step: int
    missed: int
    early: int


Action: TypeAlias = Apply[T] | Reply


class RangeState(Generic[T]):
    """The state of one range, which takes pushes (a worker's gradients); each push gets one reply.

    `staleness` 0 is synchronous: the gradients of a step are applied together, once all workers
    have pushed the step. With s > 0 each gradient is applied at once, and a worker may start step c
    if c is at most s larger than the number of steps that the slowest worker has pushed. None sets
    no bound.

    The worker and the step identify a push. A second push with the same worker and step changes
    nothing, and gets a reply too.

    >>> state = RangeState({0: 0, 1: 0}, staleness=0)
    >>> state.push(1, 0, "g1"), state.push(1, 0, "again")
    ([], [])
    >>> for action in state.push(0, 0, "g0"):
    ...     print(action)
    Apply(step=0, gradients=((0, 'g0'), (1, 'g1')), delay=0)
    Reply(worker=1, step=0, missed=0, early=0)
    Reply(worker=1, step=0, missed=0, early=0)
    Reply(worker=0, step=0, missed=0, early=0)
    """

    def __init__(self, steps: Mapping[int, int], *, staleness: int | None) -> None:
        """`steps`: number of the step that each worker pushes next."""
        self.staleness = staleness
        self.updates = 0
        """Number of updates applied: steps if synchronous, else gradients."""
        self._pushed = dict(steps)
        self._applied = dict(steps)
        self._pending: dict[int, dict[int, T]] = {}
        self._waiting: list[tuple[int, int]] = []
        self._least_applied = min(steps.values(), default=0)
        self._read_at = dict.fromkeys(steps, 0)

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that still train."""
        return tuple(sorted(self._pushed))

    @property
    def steps(self) -> dict[int, int]:
        """Number of applied steps of each worker."""
        return dict(self._applied)

    @property
    def least_applied(self) -> int:
        """Number of applied steps of the slowest worker.

        After the last worker was removed, the number stays as it was.
        """
        return self._least_applied

    def missing(self) -> tuple[int, ...]:
        """Returns the slowest workers if a reply waits for their pushes; else an empty tuple."""
        if not self._waiting:
            return ()
        least = min(self._pushed.values())
        return tuple(worker for worker in self.workers if self._pushed[worker] == least)

    def is_repeat(self, worker: int, step: int) -> bool:
        """Returns True if this worker has pushed this step before.

        Raises `ValueError` if the worker has finished or was lost, or if it skips a step.
        """
        if worker not in self._pushed:
            raise ValueError(
                f"worker {worker} has finished or was lost, but it pushes step {step}: expected a "
                f"push of workers {list(self.workers)}"
            )
        if step > self._pushed[worker]:
            raise ValueError(
                f"worker {worker}: expected a push of step {self._pushed[worker]}, found {step}"
            )
        return step < self._pushed[worker]

    def push(self, worker: int, step: int, gradient: T) -> list[Action[T]]:
        """Takes a worker's gradient of a step; returns the actions that follow.

        Raises the errors of `is_repeat`.
        """
        if not self.is_repeat(worker, step):
            self._pushed[worker] = step + 1
            self._pending.setdefault(step, {})[worker] = gradient
        self._waiting.append((worker, step))
        return self._proceed()

    def remove(self, worker: int) -> list[Action[T]]:
        """Removes a worker that has finished or was lost, with its pending gradients.

        Returns the actions that this makes possible.
        """
        self._pushed.pop(worker, None)
        self._applied.pop(worker, None)
        for gradients in self._pending.values():
            gradients.pop(worker, None)
        self._waiting = [each for each in self._waiting if each[0] != worker]
        return self._proceed()

    def restart(self, workers: Iterable[int]) -> list[Action[T]]:
        """Drops pending replies and lost workers after a failure; returns the actions that follow.

        Each remaining worker that did not receive its reply repeats its last push.
        """
        self._waiting.clear()
        actions: list[Action[T]] = []
        for worker in sorted(set(self._pushed) - set(workers)):
            actions += self.remove(worker)
        return actions

    def _proceed(self) -> list[Action[T]]:
        actions: list[Action[T]] = []
        for step in sorted(self._pending):
            if self.staleness == 0 and not self._complete(step):
                break
            actions += self._apply(step, self._pending.pop(step))
        self._least_applied = min(self._applied.values(), default=self._least_applied)
        ready = [each for each in self._waiting if self._may_read(each[1] + 1)]
        self._waiting = [each for each in self._waiting if not self._may_read(each[1] + 1)]
        return [*actions, *(self._reply(worker, step) for worker, step in ready)]

    def _complete(self, step: int) -> bool:
        return all(pushed > step for pushed in self._pushed.values())

    def _may_read(self, step: int) -> bool:
        """Returns True if the staleness lets a worker read the values for its step `step` now."""
        if self.staleness is None:
            return True
        return step - min(self._pushed.values(), default=step) <= self.staleness

    def _apply(self, step: int, gradients: dict[int, T]) -> list[Action[T]]:
        # A step may have no gradients left, if its workers were removed.
        ordered = sorted(gradients.items())
        groups = [tuple(ordered)] if self.staleness == 0 else [(each,) for each in ordered]
        actions: list[Action[T]] = []
        for group in groups:
            if group:
                delay = max(self.updates - self._read_at[worker] for worker, _ in group)
                actions.append(Apply(step=step, gradients=group, delay=delay))
                self.updates += 1
        for worker, pushed in self._pushed.items():
            self._applied[worker] = max(self._applied[worker], min(pushed, step + 1))
        return actions

    def _reply(self, worker: int, step: int) -> Reply:
        others = [steps for other, steps in self._applied.items() if other != worker]
        missed = sum(max(0, step + 1 - steps) for steps in others)
        early = sum(max(0, steps - step - 1) for steps in others)
        self._read_at[worker] = self.updates
        return Reply(worker=worker, step=step, missed=missed, early=early)
