"""Seeing a simulation: what links carried over time (a heat map), times over sizes (a chart)."""

from unisono.show.simulation.chart import chart
from unisono.show.simulation.heat import heat

__all__ = ["chart", "heat"]
