"""The result of a pipeline stage as tensors, and its form, which the next stage needs."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch

from unisono.parallel.positions import Placement, place, placement_of
from unisono.torch_backend import flatten, is_view, unflatten, without_view

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size)


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The properties of a tensor that its receiver knows in advance."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    placement: Placement | None = None
    """The division of its positions over the ranks of `cp`; None for a whole tensor."""


@dataclass(frozen=True)
class ResultForm:
    """The form of a stage's result."""

    leaves: tuple[Any, ...]
    """The form of each tensor, and the constants of the result, in order."""
    structure: Any
    """The nesting of the leaves; None if the result is a tensor."""

    @cached_property
    def tensors(self) -> tuple[TensorForm, ...]:
        """The forms of the tensors."""
        return tuple(each for each in self.leaves if isinstance(each, TensorForm))

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the tensors, and of those that need a gradient."""
        pairs = [(each, math.prod(each.shape) * each.dtype.itemsize) for each in self.tensors]
        return sum(n for _, n in pairs), sum(n for each, n in pairs if each.needs_gradient)

    @cached_property
    def text(self) -> bytes:
        """The form as bytes, which `from_text` reads."""
        places = list(range(len(self.leaves)))  # torch's description of the nesting is no message
        nesting = None if self.structure is None else unflatten(places, self.structure)
        return pickle.dumps((self.leaves, nesting))

    @cached_property
    def digest(self) -> int:
        """A number above 0 that two forms almost never share."""
        found = blake2b(self.text, digest_size=8).digest()
        return int.from_bytes(found, "little") >> 1 or 1

    @classmethod
    def from_text(cls, text: bytes) -> ResultForm:
        """Returns the form of another rank's `text`."""
        leaves, nesting = pickle.loads(text)
        return cls(leaves, None if nesting is None else flatten(nesting)[1])

    def describe(self) -> str:
        """Returns shapes and types, for an error."""
        names = [
            f"{tuple(each.shape)} {each.dtype}" if isinstance(each, TensorForm) else repr(each)
            for each in self.leaves
        ]
        return ", ".join(names) or "nothing"


def take_apart(result: Any, stage: int) -> tuple[list[torch.Tensor], ResultForm]:
    """Returns the tensors of a stage's result as messages, and the form of the result.

    Raises `ValueError` for a result that no message can carry.
    """
    leaves, structure = [result], None
    if not isinstance(result, torch.Tensor):
        leaves, structure = flatten(result)
    forms: list[Any] = []
    tensors: list[torch.Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            message = _as_message(leaf, stage)
            tensors.append(message)
            forms.append(
                TensorForm(message.shape, message.dtype, message.requires_grad, placement_of(leaf))
            )
        elif isinstance(leaf, _CONSTANTS):
            forms.append(leaf)
        else:
            raise ValueError(
                f"stage {stage} of the pipeline returns a {type(leaf).__name__}, which no message "
                "can carry; return tensors and numbers in tuples, lists or dicts, or use pp = 1"
            )
    return tensors, ResultForm(tuple(forms), structure)


def put_together(form: ResultForm, tensors: Sequence[torch.Tensor]) -> Any:
    """Returns a result of this form with these tensors, which are divided as it says."""
    for tensor, each in zip(tensors, form.tensors, strict=True):
        if each.placement is not None:
            place(tensor, each.placement)
    if form.structure is None:
        return tensors[0]
    rest = iter(tensors)
    leaves = [next(rest) if isinstance(each, TensorForm) else each for each in form.leaves]
    return unflatten(leaves, form.structure)


def _as_message(result: torch.Tensor, stage: int) -> torch.Tensor:
    """Returns a result as a contiguous tensor that is neither a view nor a leaf.

    Schedules that split the backward pass detach results in place, which views do not permit, and
    which would freeze a parameter that is a result.
    """
    if result.layout is not torch.strided or result.device.type != "cpu":
        raise ValueError(
            f"stage {stage} of the pipeline returns a tensor with {result.layout} on "
            f"{result.device}; expected dense tensors on the CPU; pp = 1 works"
        )
    found = result.contiguous()
    if is_view(found) or (found.is_leaf and found.requires_grad):
        return without_view(found)
    return found
