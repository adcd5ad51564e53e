"""Spans of a flat array of parameters, compared with the parameters themselves."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unisono.parallel.data_parallelism.flat_parameters import FlatParameters

LONGEST = 10


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 1)), min_size=1, max_size=12))
def test_spans_are_views_of_consecutive_parameters(sizes: list[tuple[int, int]]) -> None:
    parameters = [nn.Parameter(torch.arange(float(size)) + i) for i, (size, _) in enumerate(sizes)]
    groups = {each: group for each, (_, group) in zip(parameters, sizes, strict=True)}
    expected = [each.detach().clone() for each in parameters]
    flat = FlatParameters(parameters, parts=1)
    span_of = flat.spans(list(groups.values()), longest=LONGEST)
    assert list(span_of) == parameters
    end = 0
    spans = list(dict.fromkeys(span_of.values()))
    for span in spans:
        members = [each for each in parameters if span_of[each] is span]
        assert span.first == end
        end += span.weights.numel()
        assert span.weights.numel() == sum(each.numel() for each in members)
        assert len({groups[each] for each in members}) == 1
        assert len(members) == 1 or span.weights.numel() <= LONGEST
        span.weights.grad.fill_(span.first)
        with torch.no_grad():
            span.weights.add_(1)
    for before, after in itertools.pairwise(spans):  # no span could be longer
        last, following = (next(p for p in parameters if span_of[p] is s) for s in (before, after))
        together = before.weights.numel() + following.numel()
        assert groups[last] != groups[following] or together > LONGEST
    for parameter, values in zip(parameters, expected, strict=True):
        assert torch.equal(parameter, values + 1)
        assert (parameter.grad == span_of[parameter].first).all()
