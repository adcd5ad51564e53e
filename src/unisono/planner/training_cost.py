"""Time, energy and cost of a whole training run."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from unisono.planner.positive_values import require_positive
from unisono.planner.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """Time, energy and cost of a training run of many steps."""

    tokens: float
    steps: int
    seconds: float
    low_s: float
    """Lower end of the interval that holds 80 % of runs. It is as wide, relative to the time, as
    the interval of one step, because every step has the same error."""
    high_s: float
    device_hours: float
    energy_kWh: float | None
    """Energy of the run; None if the device's power is not known."""
    cost: float | None
    """Cost of the run in the currency of the price; None if the price is not known."""

    @property
    def days(self) -> float:
        """Days of the run."""
        return self.seconds / 86400


def training_run(
    prediction: Prediction,
    *,
    tokens: float,
    price_per_hour: float | None = None,
    watts: float | None = None,
    overhead: float = 1.0,
    goodput: float = 1.0,
) -> RunCost:
    """Returns time, energy and cost of training on `tokens`.

    `price_per_hour` and `watts` are for one device. None means the device's own values. The
    device's power is from the data sheet, so the energy is an upper limit. `overhead` is the ratio
    of the data centre's power to the power of the devices (1.1 to 1.6). `goodput` is the share of
    time that makes progress (`checkpoint_plan`). Raises ValueError for values that cannot exist.

    >>> from unisono import planner
    >>> step = planner.predict(
    ...     planner.load_model("gpt3-175b"),
    ...     planner.Cluster.parse("a100:1024"),
    ...     planner.Layout(dp=16, tp=8, pp=8, sequence_parallel=True, zero=1),
    ...     planner.Workload(seq=2048, global_batch=1536, micro_batch=1, recompute="full"),
    ... )
    >>> run = planner.training_run(step, tokens=300e9, price_per_hour=2.0)
    >>> run.steps, 20 < run.days < 40, run.cost == 2 * run.device_hours
    (95368, True, True)
    """
    require_positive({"tokens": tokens, "overhead": overhead, "goodput": goodput})
    if goodput > 1:
        raise ValueError(f"goodput is a share of at most 1, not {goodput}")
    device, devices = prediction.cluster.kind, prediction.cluster.devices
    price = device.price_per_hour if price_per_hour is None else price_per_hour
    power = device.watts if watts is None else watts
    steps = ceil(tokens / prediction.job.tokens)
    seconds = steps * prediction.step_s / goodput
    hours = seconds * devices / 3600
    return RunCost(
        tokens=tokens,
        steps=steps,
        seconds=seconds,
        low_s=steps * prediction.low_s / goodput,
        high_s=steps * prediction.high_s / goodput,
        device_hours=hours,
        energy_kWh=None if power is None else hours * power * overhead / 1000,
        cost=None if price is None else hours * price,
    )


def training_seconds(
    *, samples: float, work: float, rate: float, devices: int, efficiency: float
) -> float:
    """Returns samples x work of a sample / (rate x devices x efficiency), in seconds.

    `work` is the FLOPs of a sample (6 x parameters for a token of a dense model). `rate` is the
    peak FLOP/s of a device, and `efficiency` a share of this peak. Raises ValueError for values
    that are not positive.

    >>> days = training_seconds(
    ...     samples=300e9, work=6 * 175e9, rate=312e12, devices=1024, efficiency=0.45) / 86400
    >>> round(days, 1)
    25.4
    """
    values = {"samples": samples, "work": work, "rate": rate, "devices": devices}
    require_positive({**values, "efficiency": efficiency})
    return samples * work / (rate * devices * efficiency)
