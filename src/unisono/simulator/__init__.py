"""A simulator of networks that runs the very schedules: what will it take, and what limits it?

>>> import unisono
>>> from unisono import algorithms, topology
>>> torus = topology.torus([4, 4])
>>> swing = algorithms.build("all_reduce", "swing", ranks=16)
>>> unisono.simulate(swing, torus, 1e6).time_s > 0
True
"""

from unisono.simulator.bound import bound_s
from unisono.simulator.calibration import calibrate
from unisono.simulator.compare import Entry, compare
from unisono.simulator.conditions import Conditions, Endpoint, Order, Traffic
from unisono.simulator.job import Blocks, Compute, Job
from unisono.simulator.link_model import LinkModel, Regime
from unisono.simulator.result import JobTimes, Kind, Result, Step, Steps, Usage
from unisono.simulator.simulation import Progress, simulate
from unisono.simulator.trace import to_chrome_trace

__all__ = [
    "Blocks",
    "Compute",
    "Conditions",
    "Endpoint",
    "Entry",
    "Job",
    "JobTimes",
    "Kind",
    "LinkModel",
    "Order",
    "Progress",
    "Regime",
    "Result",
    "Step",
    "Steps",
    "Traffic",
    "Usage",
    "bound_s",
    "calibrate",
    "compare",
    "simulate",
    "to_chrome_trace",
]
