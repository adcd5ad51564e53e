"""The division of spans of flat arrays, so that an optimizer can treat their parts differently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import nn

from unisono.parallel.data_parallelism.flat_parameters import FlatSpan
from unisono.parallel.run.optimizers import Optimizers

Range = tuple[int, int]
"""The first element of a range of a flat array, and the element after the range."""


def divide_spans(
    spans: Sequence[FlatSpan], cuts: Iterable[int], optimizers: Optimizers
) -> list[FlatSpan]:
    """Cuts spans at elements of their flat array, and gives the optimizer the parts.

    A part takes its elements of the span's gradient and states. Scalar states are copied, so that
    the parts can count different numbers of steps. Returns all spans in order.
    """
    edges = sorted(set(cuts))
    found: list[FlatSpan] = []
    for span in spans:
        inside = [each for each in edges if span.first < each < span.end]
        found += _divide(span, inside, optimizers) if inside else [span]
    return found


def skip_ranges(
    spans: Sequence[FlatSpan], ranges: Sequence[Range], optimizers: Optimizers
) -> list[FlatSpan]:
    """Makes the optimizer's next step skip these elements. Returns the spans, cut at the ranges."""
    found = divide_spans(spans, (edge for each in ranges for edge in each), optimizers)
    for span in found:
        if any(begin <= span.first < end for begin, end in ranges):
            span.weights.grad = None
    return found


def _divide(span: FlatSpan, cuts: Sequence[int], optimizers: Optimizers) -> list[FlatSpan]:
    whole = span.weights
    bounds = [0, *(cut - span.first for cut in cuts), whole.numel()]
    owner = optimizers.owner(whole)
    states = None if owner is None else owner.state.pop(whole, None)
    parts = []
    for begin, end in pairwise(bounds):
        part = nn.Parameter(whole.detach()[begin:end])
        part.grad = None if whole.grad is None else whole.grad[begin:end]
        if owner is not None and states is not None:
            owner.state[part] = {
                name: _part_of_state(state, begin, end) for name, state in states.items()
            }
        parts.append(FlatSpan(span.first + begin, part))
    for group in optimizers.groups:
        group["params"] = [
            piece
            for each in group["params"]
            for piece in ([part.weights for part in parts] if each is whole else [each])
        ]
    return parts


def _part_of_state(state: object, begin: int, end: int) -> object:
    if not isinstance(state, torch.Tensor):
        return state
    return state.clone() if state.dim() == 0 else state[begin:end]
