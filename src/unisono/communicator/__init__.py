"""Rank, size, groups and every collective; the launcher for one machine."""

from unisono.communicator.communicator import Communicator, init
from unisono.communicator.explain import Explanation
from unisono.communicator.launch import run
from unisono.communicator.selection import Rule, Selection
from unisono.communicator.work import Work

__all__ = ["Communicator", "Explanation", "Rule", "Selection", "Work", "init", "run"]
