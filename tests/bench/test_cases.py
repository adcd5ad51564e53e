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
    ],
)
def test_bus_factors_are_those_of_nccl_tests(op: str, factor: float) -> None:
    assert OPERATIONS[op].bus_factor(4) == factor


def test_size_is_that_of_the_larger_buffer() -> None:
    case = Case(op="all_gather", ranks=4, nbytes=1024)
    assert (case.piece_count, case.count, case.size_bytes) == (64, 256, 1024)


def test_size_is_rounded_to_whole_pieces() -> None:
    assert Case(op="all_to_all", ranks=3, nbytes=1000).size_bytes == 996


def test_every_rank_has_an_element_even_of_tiny_messages() -> None:
    assert Case(op="reduce_scatter", ranks=8, nbytes=8).size_bytes == 32
    assert Case(op="reduce_scatter", ranks=8, nbytes=0).size_bytes == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"op": "allreduce"},
        {"dtype": "float31"},
        {"redop": "median"},
        {"root": 2},
        {"redop": "bxor"},
        {"dtype": "bool"},
    ],
)
def test_impossible_cases_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Case(**{"op": "all_reduce", "ranks": 2, "nbytes": 8, **wrong})
