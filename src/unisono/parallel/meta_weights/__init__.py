"""Models on the device meta: each rank gets memory and values for its own part only."""

from unisono.parallel.meta_weights.initial_values import InitialValues
from unisono.parallel.meta_weights.memory import give_memory, meta_names

__all__ = ["InitialValues", "give_memory", "meta_names"]
