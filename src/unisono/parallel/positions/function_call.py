"""A call of torch's functions with tensors that are divided by positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from unisono.parallel.context import ContextAttention, all_gather, in_natural_order
from unisono.parallel.positions.sequence_part import Placement, SequencePart, place, placement_of


class Refused(Exception):
    """Says why a function cannot be computed on divided positions, and what works instead."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(reason)
        self.reason, self.cure = reason, cure


@dataclass(kw_only=True, slots=True)  # not frozen, which would cost more than the rest of a call
class FunctionCall:
    """A function of torch, its arguments, and the division of sequences.

    Arguments that are divided by positions have a placement. The others are whole, and equal on
    all ranks.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    part: SequencePart
    attention: ContextAttention
    owns_loss: bool
    """The loss that the model computes is that of the run."""

    @property
    def first(self) -> torch.Tensor:
        """The first argument, which must be a tensor."""
        found = self.args[0] if self.args else self.options.get("input")
        if not isinstance(found, torch.Tensor):
            self.refuse("is not known with these arguments")
        return found

    @property
    def placement(self) -> Placement:
        """The placement of the first argument, which must be divided."""
        found = placement_of(self.first)
        if found is None:
            self.refuse("combines a whole tensor with one that is divided")
        return found

    def option(self, name: str, place: int, default: Any = None) -> Any:
        """Returns an argument by its name, or by its place among all arguments."""
        if name in self.options:
            return self.options[name]
        return self.args[place] if len(self.args) > place else default

    def run(self) -> Any:
        """Computes the function of this rank's parts."""
        return self.function(*self.args, **self.options)

    def like_first(self) -> Any:
        """Computes the function; its results are divided as the first argument is."""
        placement = self.placement
        self.require_whole(self.args[1:])
        return self.placed(self.run(), placement)

    def placed(self, result: Any, placement: Placement) -> Any:
        """Notes how a result is divided: a tensor, or a tuple or list of tensors."""
        if isinstance(result, torch.Tensor):
            return place(result, placement)
        for each in result:
            place(each, placement)
        return result

    def whole_shape(self, tensor: torch.Tensor) -> torch.Size:
        """Returns the shape of the whole tensor."""
        found = placement_of(tensor)
        return tensor.shape if found is None else self.part.shape(tensor, found)

    def require_whole(self, values: Any) -> None:
        """Refuses the call if one of the other arguments is divided."""
        if any(placement_of(each) is not None for each in (*values, *self.options.values())):
            self.refuse("has a second argument that is divided by positions")

    def require_other(self, dims: Any, what: str) -> None:
        """Refuses the call if it works along the divided dimension.

        `dims`: one dimension, several, or None for all.
        """
        count = self.first.dim()
        found = dims if isinstance(dims, (tuple, list)) else [dims]
        if not found or not all(type(each) is int for each in found):
            self.refuse(what)
        if any(each % count == self.placement.dim for each in found):
            self.refuse(what)

    def aligned(self, tensor: torch.Tensor, placement: Placement, dims: int) -> torch.Tensor:
        """Returns the part of an argument that is broadcast with a divided tensor of `dims`
        dimensions."""
        own, found = placement_of(tensor), placement.dim - dims + tensor.dim()
        if own is not None:
            if own != placement.at(found):
                self.refuse("combines tensors whose positions are in different dimensions")
            return tensor
        if found < 0 or tensor.shape[found] == 1:
            return tensor
        if tensor.shape[found] != self.part.size(placement):
            self.refuse(
                f"combines {self.part.size(placement)} positions with a tensor of shape "
                f"{tuple(tensor.shape)} whose positions are not known"
            )
        return self.part.of(tensor, placement.at(found))

    def gathered(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """Returns the whole tensors of parts, from the parts of all ranks. Collective.

        Tensors of one type with equally many samples need one exchange.
        """
        group = self.attention.group
        places = [each for each in map(placement_of, parts) if each is not None]
        if group is None or any(each != Placement(each.dim) for each in places):
            self.refuse("is not known with these dimensions")
        moved = [
            (each.movedim(found.dim, 1), found.dim)
            for each, found in zip(parts, places, strict=True)
        ]
        if len({(each.dtype, len(each)) for each, _ in moved}) > 1:
            return [whole for each in parts for whole in self.gathered(each)]
        rows = [each.reshape(*each.shape[:2], -1) for each, _ in moved]
        joined = rows[0] if len(rows) == 1 else torch.cat(rows, dim=2)
        whole = in_natural_order(all_gather(joined, group))
        every = torch.split(whole, [each.shape[2] for each in rows], dim=2)
        return [
            each.view(*each.shape[:2], *part.shape[2:]).movedim(1, dim)
            for each, (part, dim) in zip(every, moved, strict=True)
        ]

    def refuse(self, reason: str, cure: str = "") -> NoReturn:
        """Raises an error about this function."""
        raise Refused(f"{self.name} {reason}", cure)


Rule = Callable[[FunctionCall], Any]
"""Computes a function of divided tensors, or refuses it."""


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors among arguments, and in the lists among them."""
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (tuple, list)):
            yield from tensors_of(each)
