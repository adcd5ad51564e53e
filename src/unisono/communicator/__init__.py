"""Rank, size, groups and every collective; the launcher for one machine."""

from unisono.communicator.communicator import Communicator
from unisono.communicator.explain import Estimate, Explanation
from unisono.communicator.joining import init
from unisono.communicator.launch import run
from unisono.communicator.places import pairs
from unisono.communicator.premul import premul_sum
from unisono.communicator.selection import Measured, Rule, Selection, Span
from unisono.communicator.work import Work

__all__ = [
    "Communicator",
    "Estimate",
    "Explanation",
    "Measured",
    "Rule",
    "Selection",
    "Span",
    "Work",
    "init",
    "pairs",
    "premul_sum",
    "run",
]
