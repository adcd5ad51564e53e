"""A network simulator that runs the library's own schedules and reports times and bottlenecks.

>>> import unisono
>>> from unisono import algorithms, topology
>>> torus = topology.torus([4, 4])
>>> swing = algorithms.build("all_reduce", "swing", ranks=16)
>>> unisono.simulate(swing, torus, 1e6).time_s > 0
True
"""

from unisono.simulator.bound import bound_s
from unisono.simulator.calibration import (
    Holdout,
    calibrate,
    models_of,
    of_contestant,
    to_json,
    worse_holdout,
)
from unisono.simulator.compare import ComparedAlgorithm, compare
from unisono.simulator.conditions import Conditions, Endpoint, Order, Traffic
from unisono.simulator.job import Blocks, Compute, Job, Message
from unisono.simulator.limits import Limits
from unisono.simulator.link_model import LinkModel, Regime, nearest
from unisono.simulator.measurement_files import Sample, read
from unisono.simulator.result import JobTimes, Result, Steps, StepTime, TaskKind, Usage
from unisono.simulator.search import Search, search
from unisono.simulator.simulation import Progress, simulate
from unisono.simulator.sweep import Point, scale_factor, sweep
from unisono.simulator.trace import to_chrome_trace

__all__ = [
    "Blocks",
    "ComparedAlgorithm",
    "Compute",
    "Conditions",
    "Endpoint",
    "Holdout",
    "Job",
    "JobTimes",
    "Limits",
    "LinkModel",
    "Message",
    "Order",
    "Point",
    "Progress",
    "Regime",
    "Result",
    "Sample",
    "Search",
    "StepTime",
    "Steps",
    "TaskKind",
    "Traffic",
    "Usage",
    "bound_s",
    "calibrate",
    "compare",
    "models_of",
    "nearest",
    "of_contestant",
    "read",
    "scale_factor",
    "search",
    "simulate",
    "sweep",
    "to_chrome_trace",
    "to_json",
    "worse_holdout",
]
