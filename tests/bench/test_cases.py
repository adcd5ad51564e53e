from __future__ import annotations

import pytest

from unisono.bench.cases import OPERATIONS, Case


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("scan", 1.0),
        ("send_recv", 1.0),
        ("put", 1.0),
        ("ping_pong", 2.0),
        ("stream", 2.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests_or_the_number_of_pairs(op: str, factor: float) -> None:
    assert OPERATIONS[op].bus_factor(4) == factor


def test_size_is_that_of_the_larger_buffer() -> None:
    case = Case(op="all_gather", ranks=4, nbytes=1024)
    assert (case.shares, case.count, case.size_bytes) == ((64,) * 4, 256, 1024)


def test_size_is_rounded_to_whole_pieces() -> None:
    assert Case(op="all_to_all", ranks=3, nbytes=1000).size_bytes == 996


def test_every_rank_has_an_element_in_tiny_messages() -> None:
    assert Case(op="reduce_scatter", ranks=8, nbytes=8).size_bytes == 32
    assert Case(op="reduce_scatter", ranks=8, nbytes=0).size_bytes == 0


def test_pieces_of_the_v_forms_grow_by_rank() -> None:
    case = Case(op="reduce_scatter_v", ranks=4, nbytes=403)
    assert (case.shares, case.size_bytes) == ((10, 20, 30, 40), 400)
    assert [case.piece(rank) for rank in range(4)] == [10, 20, 30, 40]
    assert Case(op="gather_v", ranks=4, nbytes=1).shares == (0, 0, 0, 1)
    assert Case(op="scatter_v", ranks=4, nbytes=0).shares == (0, 0, 0, 0)


def test_all_to_all_v_lengths_agree_between_ranks() -> None:
    case = Case(op="all_to_all_v", ranks=5, nbytes=404)
    for rank in range(5):
        assert sum(case.lengths(rank)) == case.count == 101
        assert [case.lengths(other)[rank] for other in range(5)] == list(case.lengths(rank))


@pytest.mark.parametrize(
    "wrong",
    [
        {"op": "allreduce"},
        {"dtype": "float31"},
        {"redop": "median"},
        {"root": 2},
        {"redop": "bxor"},
        {"dtype": "bool"},
        {"redop": "lor"},
        {"redop": "minloc"},
        {"dtype": "int32_int32"},
        {"dtype": "float8_e4m3fn", "redop": "band"},
    ],
)
def test_impossible_cases_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Case(**{"op": "all_reduce", "ranks": 2, "nbytes": 8, **wrong})
