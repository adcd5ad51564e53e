"""The types of weights, activations, sums of gradients and outputs of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NARROW = (torch.bfloat16, torch.float16)
_FIELDS = ("parameters", "computation", "reduction", "output")


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The types in which a run keeps weights, computes, and sums gradients.

    Each pass uses copies of the weights in the type of `computation`, as torch's `fully_shard` does
    with its mixed precision. The gradients of a microbatch are computed in this type, and added to
    those of other microbatches in the type of `parameters`.

        run = parallelize(model, layout, precision=Precision(computation=torch.bfloat16), ...)

    Raises `ValueError` for types in which torch does not train on the CPU.
    """

    parameters: torch.dtype | None = None
    """The type of weights and optimizer states; None: that of the model. Weights of another type
    are converted when the run begins."""
    computation: torch.dtype | None = None
    """The type of activations, of the weights that passes use, and of their gradients; None: that
    of `parameters`. With float16, losses are scaled as by torch's `GradScaler`."""
    reduction: torch.dtype | None = None
    """The type in which ranks sum gradients; None: that of the weights, but float32 at least if
    `computation` is narrower."""
    output: torch.dtype | None = None
    """The type of the output that the loss receives; None: float32 if `computation` is narrower."""
    init_scale: float = 2.0**16
    """The factor of losses in the first step with float16."""
    growth_interval: int = 2000
    """Number of consecutive steps without overflow after which the factor is doubled."""

    def __post_init__(self) -> None:
        for name in _FIELDS:
            given = getattr(self, name)
            if given is not None and given not in _TYPES:
                raise ValueError(_refusal(name, given))
        if self.parameters == torch.float16:
            raise ValueError(
                "precision: parameters = torch.float16 loses small updates, and gradients of "
                "float16 cannot be unscaled; expected float32, with computation = torch.float16"
            )
        if not (isinstance(self.init_scale, int | float) and 0 < self.init_scale < math.inf):
            raise ValueError(
                f"precision: init_scale: expected a number above 0, got {self.init_scale!r}"
            )
        if type(self.growth_interval) is not int or self.growth_interval < 1:
            raise ValueError(
                "precision: growth_interval: expected a number of steps, 1 or more, got "
                f"{self.growth_interval!r}"
            )

    @property
    def computation_type(self) -> torch.dtype | None:
        """The type in which passes compute; None if each weight is used in its own type."""
        return self.computation or self.parameters

    @property
    def is_narrow(self) -> bool:
        """True if passes compute in a type of 16 bits."""
        return self.computation_type in _NARROW

    @property
    def scales_losses(self) -> bool:
        """True if gradients could underflow, so that losses are scaled."""
        return self.computation == torch.float16

    @property
    def output_type(self) -> torch.dtype | None:
        """The type of outputs that the loss receives; None if they stay as they are."""
        return self.output or (torch.float32 if self.is_narrow else None)

    def computed(self, kept: torch.dtype) -> torch.dtype:
        """Returns the type in which passes use weights that are kept in another one.

        >>> Precision(computation=torch.bfloat16).computed(torch.float32)
        torch.bfloat16
        """
        return (self.computation_type or kept) if kept.is_floating_point else kept

    def reduced(self, kept: torch.dtype) -> torch.dtype:
        """Returns the type in which ranks sum the gradients of weights.

        >>> Precision(computation=torch.bfloat16).reduced(torch.float32)
        torch.float32
        """
        if not kept.is_floating_point:
            return kept
        if self.reduction is not None:
            return self.reduction
        return torch.promote_types(kept, torch.float32) if self.is_narrow else kept


def required_precision(given: object) -> Precision:
    """Returns a precision that a program has given; the default one for None.

    Raises `ValueError` for other values.
    """
    if given is not None and not isinstance(given, Precision):
        raise ValueError(
            "precision: expected Precision(...), such as Precision(computation=torch.bfloat16), got"
            f" {given!r}"
        )
    return given or Precision()


def _refusal(name: str, given: object) -> str:
    expected = "expected torch.float64, float32, bfloat16 or float16"
    if isinstance(given, torch.dtype) and given.is_floating_point and given.itemsize == 1:
        return (
            f"precision: {name} = {given}: torch has no training in float8 on the CPU; {expected}"
        )
    return f"precision: {name}: {expected}, got {given!r}"
