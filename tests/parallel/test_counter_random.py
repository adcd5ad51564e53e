"""Random numbers that do not depend on the layout: every block equals the same part of the whole
tensor.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.parallel.counter_random import CounterRandom

RANDOM = CounterRandom(seed=3)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    start = [draw(st.integers(0, length)) for length in shape]
    sizes = [draw(st.integers(0, n - first)) for n, first in zip(shape, start, strict=True)]
    return shape, start, sizes


@given(blocks(), st.integers(0, 5))
def test_a_block_is_that_part_of_the_whole(
    block: tuple[list[int], list[int], list[int]], step: int
) -> None:
    shape, start, sizes = block
    whole = RANDOM.uniform("w", shape, step=step)
    part = RANDOM.uniform("w", shape, step=step, start=start, sizes=sizes)
    index = tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))
    assert torch.equal(part, whole[index])


def test_the_whole_is_one_stream_of_philox() -> None:
    """Tests that an element depends only on its index, and not on the tensor's shape or length."""
    flat = RANDOM.uniform("w", (1000,))
    assert torch.equal(RANDOM.uniform("w", (10, 100)).flatten(), flat)
    assert torch.equal(RANDOM.uniform("w", (37,)), flat[:37])


def test_sites_steps_and_seeds_differ() -> None:
    n = 20_000
    streams = [
        RANDOM.normal("a", (n,)),
        RANDOM.normal("b", (n,)),
        RANDOM.normal("a", (n,), step=1),
        CounterRandom(seed=4).normal("a", (n,)),
    ]
    correlation = np.corrcoef(torch.stack(streams).numpy()) - np.eye(4)
    assert np.abs(correlation).max() < 5 / math.sqrt(n)


def test_values_are_normal() -> None:
    x = RANDOM.normal("a", (200_000,))
    moments = [float((x**k).mean()) for k in (1, 2, 3, 4)]
    # The tolerance of a moment is five standard errors. The variance of x^k is E x^2k - (E x^k)^2.
    for moment, expected, variance in zip(moments, (0, 1, 0, 3), (1, 2, 15, 96), strict=True):
        assert abs(moment - expected) < 5 * math.sqrt(variance / len(x))


def test_a_mask_keeps_its_share() -> None:
    mask = RANDOM.keep_mask("dropout", (100_000,), drop=0.3, step=9)
    assert mask.dtype == torch.bool
    assert abs(float(mask.double().mean()) - 0.7) < 5 * math.sqrt(0.21 / len(mask))
    assert RANDOM.keep_mask("dropout", (50,), drop=0.0).all()


def test_wrong_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"inside the shape \(4, 2\), got \(2, 2\) elements"):
        RANDOM.uniform("w", (4, 2), start=(3, 0), sizes=(2, 2))
    with pytest.raises(ValueError, match="a probability from 0 to below 1, got 1"):
        RANDOM.keep_mask("w", (4,), drop=1)
