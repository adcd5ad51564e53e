"""Tensor parallelism of any model, by a table of module names and styles.

`plan` finds what the ranks divide of a model, before anything is changed.
"""

from unisono.parallel.tensor_plan.model_plan import ModelPlan, plan
from unisono.parallel.tensor_plan.styles import StyleName

__all__ = ["ModelPlan", "StyleName", "plan"]
