"""Drawings of a simulation: a heat map of the links' traffic over time, and a chart of times over
sizes."""

from unisono.show.simulation.chart import time_chart
from unisono.show.simulation.heat import link_heat_map

__all__ = ["link_heat_map", "time_chart"]
