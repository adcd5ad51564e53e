from __future__ import annotations

import pytest

from unisono.errors import ScheduleError
from unisono.schedule import Collective
from unisono.types import Op


def collective(op: Op, ranks: int, parts: int = 1) -> Collective:
    return Collective(op=op, ranks=ranks, parts=parts, root=ranks // 2 if op.rooted else None)


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("parts", [1, 3])
def test_initial_and_wanted_agree_with_holds_and_wants(op: Op, ranks: int, parts: int) -> None:
    c = collective(op, ranks, parts)
    chunks = range(c.num_chunks)
    for rank in range(ranks):
        assert list(c.initial(rank)) == [k for k in chunks if c.holds(rank, k)]
        assert list(c.wanted(rank)) == [k for k in chunks if c.wants(rank, k)]
        assert list(c.expected(rank)) == list(c.wanted(rank))
    for chunk in chunks:
        holders = {rank for rank in range(ranks) if c.holds(rank, chunk)}
        for rank in range(ranks):
            below = {Op.SCAN: rank + 1, Op.EXSCAN: rank}.get(op, ranks)
            assert c.contributors(rank, chunk) == holders & set(range(below))


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("parts", [1, 2])
def test_refs_cover_every_part_of_every_piece_once(op: Op, parts: int) -> None:
    c = collective(op, 4, parts)
    for rank in range(4):
        inputs = [c.input_ref(rank, k) for k in c.initial(rank)]
        outputs = [c.output_ref(rank, k) for k in c.wanted(rank)]
        assert len(set(inputs)) == len(inputs)
        assert len(set(outputs)) == len(outputs)
        if inputs:
            all_parts = [(i, j) for i in range(c.input_pieces(rank)) for j in range(parts)]
            assert sorted(filter(None, inputs)) == all_parts
        if outputs:
            all_parts = [(i, j) for i in range(c.output_pieces(rank)) for j in range(parts)]
            assert sorted(filter(None, outputs)) == all_parts


def test_refs_are_none_without_a_chunk() -> None:
    c = collective(Op.ALL_TO_ALL, 3)
    assert c.input_ref(0, 3) is None  # chunk 3 is sent by rank 1 to rank 0
    assert c.input_ref(1, 3) == (0, 0)
    assert c.output_ref(0, 3) == (1, 0)
    assert c.output_ref(1, 3) is None


def test_in_place_output_is_the_piece_at_the_same_address() -> None:
    assert collective(Op.ALL_GATHER, 4).in_place_output(2, 0) == 2
    assert collective(Op.REDUCE_SCATTER, 4).in_place_output(2, 2) == 0
    assert collective(Op.REDUCE_SCATTER, 4).in_place_output(2, 1) is None
    assert collective(Op.ALL_TO_ALL, 4).in_place_output(2, 3) == 3
    assert collective(Op.GATHER, 4).in_place_output(0, 0) is None
    assert collective(Op.GATHER, 4).in_place_output(2, 0) == 2


@pytest.mark.parametrize(
    ("op", "ranks", "parts", "root", "text"),
    [
        (Op.ALL_REDUCE, 0, 1, None, "ranks, got 0"),
        (Op.ALL_REDUCE, 1 << 20, 1, None, "ranks"),
        (Op.ALL_REDUCE, 2, 0, None, "parts, got 0"),
        (Op.ALL_REDUCE, 2, 1, 0, "expected no root"),
        (Op.BROADCAST, 2, 1, None, "got None"),
        (Op.BROADCAST, 2, 1, 2, "got 2"),
        (Op.BROADCAST, 2, 1, -1, "got -1"),
    ],
)
def test_invalid_collectives_are_rejected(
    op: Op, ranks: int, parts: int, root: int | None, text: str
) -> None:
    with pytest.raises(ScheduleError, match=text):
        Collective(op=op, ranks=ranks, parts=parts, root=root)
