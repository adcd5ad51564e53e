"""Reductions with a Python function: the order in which ranks' contributions are passed to the
function, its errors, and the results.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ranks import Threads
from unisono import (
    AbortedError,
    Communicator,
    MismatchError,
    UnsupportedError,
    pairs,
)

torch = pytest.importorskip("torch")

Array = NDArray[Any]
World = Callable[[int], Threads]

LENGTHS = [0, 1, 7, 1000]
RANKS = [*range(1, 10)]


# ---- functions


def affine(a: Any, b: Any) -> Any:
    """Composes the functions x -> a[0] x + a[1]; this is associative, but not commutative."""
    first, then = a.reshape(2, -1), b.reshape(2, -1)
    result = a.clone() if hasattr(a, "clone") else a.copy()
    result.reshape(2, -1)[0] = first[0] * then[0]
    result.reshape(2, -1)[1] = first[1] * then[0] + then[1]
    return result


@given(ranks=st.sampled_from(RANKS), count=st.sampled_from(LENGTHS), tensors=st.booleans())
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_a_function_is_called_in_rank_order(
    ranks: int, count: int, tensors: bool, threads: World
) -> None:
    rows = np.random.default_rng(ranks * 1000 + count).integers(-3, 4, (ranks, ranks, 2, count))
    expected = functools.reduce(lambda a, b: np.stack([affine(x, y) for x, y in zip(a, b)]), rows)  # noqa: B905

    def check(comm: Communicator) -> None:
        me = comm.rank
        make = torch.tensor if tensors else np.array
        x = make(rows[me])
        assert np.array_equal(
            comm.reduce_scatter(x, op=affine), expected[me : me + 1].reshape(1, 2, count)
        )
        pieces = [make(piece) for piece in rows[me]]
        assert np.array_equal(comm.reduce_scatter(pieces, op=affine), expected[me])
        assert np.array_equal(x, rows[me])
        y = make(rows[me][0])
        assert comm.all_reduce(y, affine) is y
        assert np.array_equal(y, expected[0])
        y = make(rows[me][0])
        assert comm.reduce(y, ranks - 1, affine, async_op=True).wait() is y
        assert np.array_equal(y, expected[0] if me == ranks - 1 else rows[me][0])
        prefixes = list(itertools.accumulate(rows[:, 0], affine))
        y = make(rows[me][0])
        assert comm.scan(y, affine) is y
        assert np.array_equal(y, prefixes[me])
        y = make(rows[me][0])
        assert comm.exscan(y, affine) is y
        assert np.array_equal(y, prefixes[me - 1] if me else rows[0][0])

    threads(ranks).run(check)


def test_functions_may_be_ufuncs_or_use_whole_arrays(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = np.array([[1, comm.rank + 1], [0, 1]])
        assert comm.all_reduce(x, np.matmul).tolist() == [[1, 6], [0, 1]]
        work = comm.all_reduce(torch.tensor([1, comm.rank]), torch.maximum, async_op=True)
        assert work.result().tolist() == [1, 2]
        assert work.is_completed() and work.exception() is None
        scalar = np.array(2.0 + comm.rank)
        assert comm.all_reduce(scalar, np.hypot).tolist() == pytest.approx(29**0.5)
        strided = np.zeros(6)[::2]
        strided[...] = comm.rank
        assert comm.all_reduce(strided, functools.partial(np.add)).tolist() == [3, 3, 3]
        p = pairs(np.ones(2), comm.rank)
        assert comm.all_reduce(p, lambda a, b: b).tolist() == [(1.0, 2)] * 2

    threads(3).run(check)


def test_an_error_of_the_function_is_the_cause_on_all_ranks() -> None:
    def check(comm: Communicator) -> None:
        def careful(a: Array, b: Array) -> Array:
            if comm.rank == 1:
                raise ArithmeticError("no good")
            return a + b

        comm.all_reduce(np.ones(3), careful)
        comm.barrier()

    with Threads(3) as world:
        first, second, third = world.outcomes(check)
    assert isinstance(second, ArithmeticError)
    for outcome in (first, third):
        assert isinstance(outcome, AbortedError)
        assert "rank 1: the reduction" in str(outcome)
        assert "careful raised ArithmeticError: no good" in str(outcome)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda a, b: (a + b)[:1], "of shape .3,. and type float64 .*, not of shape .1,."),
        (lambda a, b: a < b, "not of shape .3,. and type bool"),
        (lambda a, b: None, "type NoneType"),
    ],
)
def test_a_function_must_return_an_array_like_its_arguments(
    function: Callable[[Array, Array], Any], text: str
) -> None:
    with Threads(2) as world:
        for outcome in world.outcomes(lambda comm: comm.all_reduce(np.ones(3), function)):
            assert isinstance(outcome, (TypeError, AbortedError))
            if isinstance(outcome, TypeError):
                assert re.search(text, str(outcome))


def test_different_functions_are_a_mismatch() -> None:
    def check(comm: Communicator) -> None:
        comm.all_reduce(np.ones(3), np.maximum if comm.rank == 1 else np.minimum)

    with Threads(3) as world:
        for outcome in world.outcomes(check):
            assert isinstance(outcome, MismatchError)
            for text in ("rank 0 called all_reduce(numpy.minimum, float64[3])", "numpy.maximum"):
                assert text in str(outcome)


def test_wrong_arguments_with_functions_are_refused(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(UnsupportedError, match=r"algorithm='ring' cannot run .*add"):
            comm.all_reduce(np.ones(3), np.add, algorithm="ring")
        with pytest.raises(ValueError, match=r"out has 3 elements.*share of rank . is 2"):
            comm.reduce_scatter(np.ones(4), np.ones(3), np.add)
        with pytest.raises(TypeError, match="NumPy array"):
            comm.all_reduce([1], np.add)
        with pytest.raises(TypeError, match="root: expected the number of a rank, not '0'"):
            comm.reduce(np.ones(3), "0", np.add)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="one array per rank, 2, not 1"):
            comm.reduce_scatter([np.ones(3)], None, np.add)
        assert comm.all_reduce(np.ones(1)).tolist() == [2]

    threads(2).run(check)
