"""`Communicator.explain`: the chosen algorithm and, on request, times measured by all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono.communicator.arguments import as_integer, check_rank
from unisono.communicator.estimate import estimate_call_s
from unisono.communicator.explanation import Estimate, Explanation
from unisono.errors import UnsupportedError
from unisono.types import Op

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator

_REPETITIONS = 5
_REPETITION_S = 5e-3
_CALIBRATION_S = 1e-3
_MOST_CALLS = 2_000
_DTYPES = {1: np.uint8, 2: np.float16, 4: np.float32, 8: np.float64, 16: np.complex128}


def explain(
    self: Communicator,
    op: str | Op,
    nbytes: int,
    root: int = 0,
    *,
    dtype_bytes: int = 4,
    measure: bool = False,
) -> Explanation:
    """Explains which algorithm serves a call, and why. `nbytes` is the length of the caller's
    larger buffer (input or output).

    The explanation has the rule and its source, predicted and measured times, and the runner-up.
    `dtype_bytes` is the size of one element, for rules that depend on it. Measured times come from
    `unisono tune`. With `measure=True`, all ranks must call `explain`. It then times the chosen
    algorithm and the runner-up, which takes some hundredths of a second.

    >>> import unisono
    >>> with unisono.init(rank=0, size=1, rendezvous="example of explain") as comm:
    ...     comm.explain("all_reduce", 1 << 20).algorithm
    'direct'
    """
    self._require_open()
    if op not in list(Op):
        raise UnsupportedError(f"op: expected one of {', '.join(Op)}, not {op!r}")
    nbytes = as_integer(nbytes, "nbytes", "a number of bytes")
    if nbytes < 0:
        raise ValueError(f"nbytes: expected a number from 0 up, not {nbytes}")
    op = Op(op)
    if op.rooted:
        check_rank(root, self.size, "root")
    if measure:
        self._engine.refuse_in_batch("explain with measure=True")
    call_cache = self._engine.call_cache
    choice = call_cache.choose(op, nbytes, root if op.rooted else -1, dtype_bytes=dtype_bytes)
    choice = replace(choice, plan=call_cache.form(choice, op, nbytes))
    found = Explanation.of(op, nbytes, call_cache.hosts, choice, call_cache.table)
    return _timed(self, found, root, dtype_bytes) if measure else found


def _timed(comm: Communicator, found: Explanation, root: int, dtype_bytes: int) -> Explanation:
    """Returns the explanation with newly measured times of its algorithms."""
    if dtype_bytes not in _DTYPES:
        raise UnsupportedError(f"dtype_bytes: expected one of {sorted(_DTYPES)}, not {dtype_bytes}")
    calls = {found.algorithm: _call(comm, found, root, dtype_bytes, None)}
    if found.runner_up is not None:
        name = found.runner_up.algorithm
        calls[name] = _call(comm, found, root, dtype_bytes, name)
    times_s = _time_alternately(comm, calls)

    def with_time(estimate: Estimate) -> Estimate:
        return replace(estimate, measured_s=times_s.get(estimate.algorithm))

    second = None if found.runner_up is None else with_time(found.runner_up)
    return replace(found, time=with_time(found.time), runner_up=second)


def _call(
    comm: Communicator, found: Explanation, root: int, dtype_bytes: int, algorithm: str | None
) -> Callable[[], Any]:
    """Returns a function that makes the explained call with `algorithm`; None means the algorithm
    that the library chooses.
    """
    op = found.op
    if op is Op.BARRIER:
        return comm.barrier
    count = found.nbytes // dtype_bytes
    x, piece = (np.zeros(n, np.dtype(_DTYPES[dtype_bytes])) for n in (count, count // comm.size))
    pieces = x[: piece.size * comm.size]
    buffers: dict[Op, list[Any]] = {
        Op.ALL_GATHER: [piece, pieces],
        Op.GATHER: [piece, pieces],
        Op.REDUCE_SCATTER: [pieces, piece],
        Op.SCATTER: [pieces, piece],
        Op.ALL_TO_ALL: [pieces, np.zeros_like(pieces)],
    }
    arguments = [*buffers.get(op, [x]), *([root] if op.rooted else [])]
    return lambda: getattr(comm, op)(*arguments, algorithm=algorithm)


def _time_alternately(comm: Communicator, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Returns the seconds per call of each algorithm: the median of several repetitions, each timed
    on its slowest rank.
    """
    repetitions: dict[str, list[float]] = {}
    calls_of: dict[str, int] = {}
    for name, call in calls.items():
        try:
            call()
        # All ranks raise this, for example if a reproducible communicator does not permit the
        # algorithm.
        except UnsupportedError:
            continue
        # All ranks see the same times, so all make the same number of calls.
        call_s = estimate_call_s(
            partial(time_s, comm, call), least_s=_CALIBRATION_S, most=_MOST_CALLS
        )
        calls_of[name] = max(1, min(_MOST_CALLS, int(_REPETITION_S / call_s)))
        repetitions[name] = []
    for _ in range(_REPETITIONS):
        for name, times_s in repetitions.items():
            times_s.append(time_s(comm, calls[name], calls_of[name]))
    return {name: median(times_s) for name, times_s in repetitions.items()}


def time_s(comm: Communicator, call: Callable[[], object], count: int) -> float:
    """Returns the slowest rank's seconds per call, for back-to-back calls. All ranks must call
    this.
    """
    comm.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    mine = np.array([(time.perf_counter() - start) / count])
    return float(comm.all_reduce(mine, "max")[0])
