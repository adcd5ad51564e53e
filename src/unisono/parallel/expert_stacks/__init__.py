"""Experts of any model, stacked in parameters of three dimensions, over the ranks of `ep`.

`find_stacks` finds and checks them before anything is changed. `DividedExperts` keeps those of this
rank, and exchanges the rows of their tokens.
"""

from unisono.parallel.expert_stacks.divided_experts import DividedExperts
from unisono.parallel.expert_stacks.expert_stack import ExpertStack
from unisono.parallel.expert_stacks.found_stacks import FoundStacks, find_stacks

__all__ = ["DividedExperts", "ExpertStack", "FoundStacks", "find_stacks"]
