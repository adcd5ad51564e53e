"""The zigzag division and its blocks, as functions without communication, compared with masks of
NumPy.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.parallel.context import zigzag_part
from unisono.parallel.context.attention_blocks import (
    AttentionBlock,
    MergedAttention,
    block_of_ring,
    blocks_of_whole,
)
from unisono.parallel.context.zigzag import in_natural_order, in_zigzag_parts

pytestmark = pytest.mark.torch
ranks_and_chunks = (st.integers(1, 6), st.integers(1, 5))


def attended(blocks: list[tuple[AttentionBlock, torch.Tensor, torch.Tensor]], length: int):
    """Returns the number of times that each query attends to each key, as an array (length,
    length).
    """
    counts = np.zeros((length, length), int)
    for block, queries, keys in blocks:
        rows, columns = queries[block.queries].numpy(), keys[block.keys].numpy()
        mask = np.ones((len(rows), len(columns)), int)
        if block.is_causal:
            mask = np.tril(mask)
        counts[np.ix_(rows, columns)] += mask
    return counts


def expected(length: int, is_causal: bool):
    whole = np.ones((length, length), int)
    return np.tril(whole) if is_causal else whole


@given(*ranks_and_chunks)
def test_each_position_is_on_one_rank(ranks: int, chunk: int) -> None:
    length = 2 * ranks * chunk
    parts = [zigzag_part(length, rank, ranks) for rank in range(ranks)]
    assert all(part.dtype == torch.int64 and len(part) == 2 * chunk for part in parts)
    assert all((part.diff() > 0).all() for part in parts)
    assert sorted(torch.cat(parts).tolist()) == list(range(length))


def test_one_rank_holds_any_length() -> None:
    assert zigzag_part(7, 0, 1).tolist() == list(range(7))


@pytest.mark.parametrize(
    ("length", "ranks", "near"), [(10, 2, 8), (11, 2, 12), (1, 4, 8), (0, 3, 6), (20, 3, 18)]
)
def test_other_lengths_are_refused(length: int, ranks: int, near: int) -> None:
    text = f"multiple of 2 x {ranks} = {2 * ranks}, got {length}; the nearest is {near}$"
    with pytest.raises(ValueError, match=text):
        zigzag_part(length, 0, ranks)


@pytest.mark.parametrize("rank", [-1, 2])
def test_other_ranks_are_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank: expected 0 to 1, got {rank}"):
        zigzag_part(8, rank, 2)


@given(*ranks_and_chunks)
def test_natural_order_and_back(ranks: int, chunk: int) -> None:
    length = 2 * ranks * chunk
    whole = torch.arange(3 * length * 2).reshape(3, length, 2)
    zigzag = torch.stack(
        [whole[:, zigzag_part(2 * ranks * chunk, r, ranks)] for r in range(ranks)]
        if ranks > 1
        else [whole]
    )
    assert torch.equal(in_natural_order(zigzag), whole)
    assert torch.equal(in_zigzag_parts(whole, ranks), zigzag)


@given(*ranks_and_chunks, st.booleans())
def test_ring_attends_to_each_key_once(ranks: int, chunk: int, is_causal: bool) -> None:
    length = 2 * ranks * chunk
    parts = [zigzag_part(length, rank, ranks) for rank in range(ranks)]
    blocks = [
        (block_of_ring(rank, source, 2 * chunk, is_causal=is_causal), parts[rank], parts[source])
        for rank in range(ranks)
        for source in range(ranks)
    ]
    assert (attended(blocks, length) == expected(length, is_causal)).all()


@given(*ranks_and_chunks, st.booleans())
def test_gathered_keys_are_each_attended_to_once(ranks: int, chunk: int, is_causal: bool) -> None:
    length = 2 * ranks * chunk
    blocks = [
        (block, zigzag_part(length, rank, ranks), torch.arange(length))
        for rank in range(ranks)
        for block in blocks_of_whole(rank, ranks, 2 * chunk, is_causal=is_causal)
    ]
    assert (attended(blocks, length) == expected(length, is_causal)).all()


@given(st.integers(2, 6), st.integers(1, 5))
def test_all_ranks_have_the_same_work(ranks: int, chunk: int) -> None:
    parts = [zigzag_part(2 * ranks * chunk, rank, ranks) for rank in range(ranks)]
    for step in range(ranks):  # the work is equal in each step, so that ranks do not wait
        work = set()
        for rank in range(ranks):
            source = (rank - step) % ranks
            block = block_of_ring(rank, source, 2 * chunk, is_causal=True)
            counts = attended([(block, parts[rank], parts[source])], 2 * ranks * chunk)
            work.add(int(counts.sum()))
        assert len(work) == 1


def scores_of(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5


@settings(max_examples=20)
@given(st.integers(1, 4), st.sampled_from([1.0, 30.0]), st.integers(0, 100))
def test_merged_blocks_are_one_softmax(blocks: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 3, 4 * blocks, 5)
    query, key, value = (
        torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(3)
    )
    query *= scale
    merged = MergedAttention(query)
    for place in range(blocks):
        block = AttentionBlock(keys=slice(4 * place, 4 * place + 4))
        merged.add((key, value), block)
    scores = scores_of(query, key)
    torch.testing.assert_close(merged.out, scores.softmax(-1) @ value, rtol=0, atol=1e-12)
    torch.testing.assert_close(merged.logsumexp, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)
