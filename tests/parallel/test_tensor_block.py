"""Division of a range of a row-major tensor into rectangles."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from unisono.parallel.checkpoint import TensorBlock, flat_range_blocks

pytestmark = pytest.mark.torch


@given(sizes=st.lists(st.integers(1, 4), max_size=4), data=st.data())
def test_rectangles_cover_the_range_once_and_nothing_else(sizes, data) -> None:
    total = math.prod(sizes)
    first = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, total - first))
    blocks = flat_range_blocks("w", sizes, [0] * len(sizes), sizes, first, torch.ones(count))
    covered = torch.zeros(sizes)
    for block in blocks:
        covered[places(block)] += block.values
    expected = torch.zeros(total)
    expected[first : first + count] = 1
    assert torch.equal(covered.flatten(), expected)
    assert len(blocks) <= max(2 * len(sizes) - 1, 1)


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_rectangles_hold_the_elements_in_order(sizes, data) -> None:
    total = math.prod(sizes)
    start = [data.draw(st.integers(0, 2)) for _ in sizes]
    shape = [a + b + 1 for a, b in zip(start, sizes, strict=True)]
    first = data.draw(st.integers(0, total))
    whole = torch.arange(math.prod(shape)).view(shape)
    inner = whole[tuple(slice(a, a + b) for a, b in zip(start, sizes, strict=True))]
    values = inner.flatten()[first:]
    for block in flat_range_blocks("w", shape, start, sizes, first, values):
        assert torch.equal(whole[places(block)], block.values)


def places(block: TensorBlock) -> tuple[slice, ...]:
    return tuple(
        slice(first, first + count)
        for first, count in zip(block.start, block.values.shape, strict=True)
    )


def test_a_block_outside_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w: expected a block inside the shape \(3,\)"):
        TensorBlock(name="w", shape=(3,), start=(2,), values=torch.zeros(2))
    with pytest.raises(ValueError, match="expected a range inside 6 elements, got 4 from 3"):
        flat_range_blocks("w", (2, 3), (0, 0), (2, 3), 3, torch.zeros(4))
