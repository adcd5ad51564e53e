"""Spans of a flat array of parameters, compared with the elements one by one."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from unisono.parallel.data_parallelism.flat_parameters import FlatParameters

LONGEST = 10


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 1)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from([None, LONGEST]),
    st.data(),
)
def test_spans_are_views_of_a_range(
    sizes: list[tuple[int, int]], parts: int, longest: int | None, data: st.DataObject
) -> None:
    parameters = [nn.Parameter(torch.arange(float(size)) + i) for i, (size, _) in enumerate(sizes)]
    expected = torch.cat([each.detach() for each in parameters])
    groups = [group for size, group in sizes for _ in range(size)]
    owners = [i for i, (size, _) in enumerate(sizes) for _ in range(size)]
    flat = FlatParameters(parameters, parts=parts)
    begin, end = flat.part(data.draw(st.integers(0, parts - 1)))
    spans = flat.spans([group for _, group in sizes], longest=longest, begin=begin, end=end)
    places = []
    for span, group in spans:
        held = range(span.first, span.first + span.weights.numel())
        assert {groups[i] for i in held} == {group}
        assert longest is None or len(held) <= longest or len({owners[i] for i in held}) == 1
        places += held
        with torch.no_grad():
            span.weights.add_(1)
    assert places == list(range(begin, min(end, len(expected))))  # without the padding
    for (before, group), (after, following) in itertools.pairwise(spans):  # as long as possible
        owner = owners[after.first]
        together = before.weights.numel() + sum(owners[i] == owner for i in places)
        assert group != following or (longest is not None and together > longest)
    expected[begin:end] += 1
    assert torch.equal(torch.cat([each.detach() for each in parameters]), expected)
