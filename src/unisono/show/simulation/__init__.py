"""Drawings of a simulation: traffic of links over time (a heat map), times over sizes (a chart)."""

from unisono.show.simulation.chart import time_chart
from unisono.show.simulation.heat import link_heat_map

__all__ = ["link_heat_map", "time_chart"]
