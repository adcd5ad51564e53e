"""Drawings of a simulation: a heat map of the links' traffic over time, and a chart of times over
sizes."""

from unisono.show.simulation.link_heat_map import link_heat_map
from unisono.show.simulation.time_chart import time_chart

__all__ = ["link_heat_map", "time_chart"]
