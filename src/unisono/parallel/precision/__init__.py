"""The types in which a run keeps weights, computes, and sums gradients."""

from unisono.parallel.precision.computed_weights import ComputedWeights, traced_weights
from unisono.parallel.precision.loss_scaler import LossScaler
from unisono.parallel.precision.precise_modules import cast_inputs, convert_parameters
from unisono.parallel.precision.precision import Precision, required_precision

__all__ = [
    "ComputedWeights",
    "LossScaler",
    "Precision",
    "cast_inputs",
    "convert_parameters",
    "required_precision",
    "traced_weights",
]
