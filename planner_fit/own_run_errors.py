"""Errors after a calibration with own runs: with other runs of the same source."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from left_out_errors import LeftOutSource
from published_runs import grouped

from unisono.planner import Calibration, predict

_CALIBRATIONS = 12
"""Largest number of calibrations with runs of a source, one after another."""
_PREDICTED = 100
"""Largest number of runs of a source that are predicted with these calibrations."""


@dataclass(frozen=True, kw_only=True)
class OwnRunErrors:
    """Errors after a calibration with `runs` other runs of the same source."""

    runs: int
    error: float
    """Mean absolute error of the step time."""
    blind_error: float
    """Mean absolute error of the same runs without calibration."""
    covered: float
    """Share of runs inside the 80 % interval."""


def own_run_errors(source: LeftOutSource, count: int) -> OwnRunErrors | None:
    """Returns the errors after calibrations with `count` runs of one release of the source.

    At most 12 sets of runs calibrate, one at a time, and predict at most 100 other runs of the
    release. Returns None if no release has more than `count` runs.
    """
    rows = []
    steps = list(zip(source.runs, source.predictions, strict=True))
    for _, members in grouped(steps, lambda pair: pair[0].table_source):
        predicted = members[:: -(-len(members) // _PREDICTED)]
        for chosen in _own_sets(len(members), count):
            own = [members[i] for i in chosen]
            runs = tuple(step.as_own_run(run.name, run.measured_s) for run, step in own)
            known = Calibration(runs=runs)
            for run, blind in predicted:
                if all(run is not each for each, _ in own):
                    # The run had one configuration: the open choices of the blind prediction.
                    found = predict(
                        run.model,
                        run.cluster,
                        blind.layout,
                        blind.job,
                        constants=source.constants,
                        calibration=known,
                    )
                    inside = found.low_s <= run.measured_s <= found.high_s
                    ratios = found.step_s / run.measured_s, blind.step_s / run.measured_s
                    rows.append((*(abs(ratio - 1) for ratio in ratios), float(inside)))
    if not rows:
        return None
    error, blind_error, covered = map(float, np.mean(rows, axis=0))
    return OwnRunErrors(runs=count, error=error, blind_error=blind_error, covered=covered)


def _own_sets(total: int, count: int) -> list[tuple[int, ...]]:
    """Returns sets of `count` of `total` runs, at equal distances in the order of the table."""
    if total <= count:
        return []
    starts = range(0, total, -(-total // _CALIBRATIONS))
    return [tuple((first + i * total // count) % total for i in range(count)) for first in starts]
