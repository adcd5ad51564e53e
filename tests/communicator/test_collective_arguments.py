"""Arguments of collectives: accepted forms, allocated results, and errors for wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranks import Threads
from unisono import Communicator, UnsupportedError, algorithms
from unisono.types import Op

World = Callable[[int], Threads]


def test_numpy_integers_and_reduction_names_are_accepted(threads: World) -> None:
    def check(comm: Communicator) -> None:
        for root in (1, np.int64(1), True):
            for _ in range(2):  # the second call skips the checks
                x = np.full(2, comm.rank)
                assert comm.broadcast(x, root).tolist() == [1, 1]
        for name in ("prod", "product", "PRODUCT"):
            assert comm.all_reduce(np.full(2, comm.rank + 2), name).tolist() == [6, 6]
        assert comm.all_reduce(np.full(2, comm.rank * 2), "average").tolist() == [1, 1]
        for later in (1, np.True_):
            assert comm.all_reduce(np.ones(2), async_op=later).wait().tolist() == [2, 2]
        assert comm.all_reduce(np.ones(2), async_op=None).tolist() == [2, 2]

    threads(2).run(check)


def test_allocated_results_have_the_documented_shapes(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = np.ones((6, 5), np.int32)
        assert comm.all_gather(x).shape == (18, 5)
        assert comm.all_gather(np.array(3)).shape == (3,)
        assert comm.reduce_scatter(x).shape == (2, 5)
        assert comm.reduce_scatter(np.ones((5, 6))).shape == (10,)
        assert comm.all_to_all(x).shape == (6, 5)
        assert comm.all_reduce(np.array(2.0)).shape == ()
        gathered = comm.gather(x, root=1)
        assert (gathered is None) if comm.rank != 1 else (gathered.shape == (18, 5))
        with_root = comm.scatter(x if comm.rank == 0 else None, np.ones((2, 5), np.int32))
        assert with_root.shape == (2, 5)
        assert comm.scatter(x if comm.rank == 0 else None, None if comm.rank == 0 else x[:2]).shape

    threads(3).run(check)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda c: c.all_reduce(np.ones(3), "mean"),
            UnsupportedError,
            "expected .*sum.*not 'mean'",
        ),
        (lambda c: c.all_reduce(np.ones(3), None), UnsupportedError, "op: expected .*not None"),
        (lambda c: c.all_reduce(np.ones(3), algorithm=5), TypeError, "a name or a Schedule, not 5"),
        (lambda c: c.all_reduce(np.ones(3), algorithm="magic"), UnsupportedError, "magic.*ring"),
        (lambda c: c.broadcast(np.ones(3), root=2), ValueError, "root 2"),
        (lambda c: c.broadcast(np.ones(3), root="0"), TypeError, "number of a rank, not '0'"),
        (lambda c: c.broadcast(np.ones(3), root=1.0), TypeError, "number of a rank, not 1.0"),
        (lambda c: c.gather(np.ones(3), root=None), TypeError, "number of a rank, not None"),
        (lambda c: c.broadcast(np.ones(3), root=1 << 70), ValueError, "is not one of the 2"),
        (lambda c: c.reduce(np.ones(3), root=-1), ValueError, "root -1"),
        (lambda c: c.gather(np.ones(3), root=7), ValueError, "root 7"),
        (lambda c: c.scatter(np.ones(4), np.ones(2), root=2), ValueError, "root 2"),
        (lambda c: c.all_gather(np.ones(3), np.ones(5)), ValueError, "out has 5.*needs 6"),
        (lambda c: c.all_gather(np.ones(3), np.ones(6, np.int64)), ValueError, "float64.*int64"),
        (lambda c: c.reduce_scatter(np.ones(3)), ValueError, "multiple of 2 .*has 3 elements"),
        (lambda c: c.reduce_scatter(np.ones(4), np.ones(3)), ValueError, "3 elements"),
        (lambda c: c.all_to_all(np.ones(3)), ValueError, "multiple of 2 .*has 3 elements"),
        (lambda c: c.all_to_all([np.ones(3)] * 2), ValueError, "needs out"),
        (lambda c: c.all_to_all([np.ones(3)] * 3, [np.ones(3)] * 3), ValueError, "one array per"),
        (lambda c: c.all_reduce([1, 2, 3]), TypeError, "NumPy array.*not list"),
        (lambda c: c.all_reduce(None), TypeError, "NumPy array.*not NoneType"),
        (lambda c: c.all_reduce(np.array(["a"])), UnsupportedError, "type <U1"),
        (lambda c: c.all_reduce(np.ones(2, np.longdouble)), UnsupportedError, "float128"),
        (lambda c: c.all_reduce(np.array([object()])), UnsupportedError, "object"),
        (lambda c: c.all_reduce(np.zeros(2, "M8[s]")), UnsupportedError, "datetime64"),
        (lambda c: c.all_reduce(np.zeros(2, [("a", "f4")])), UnsupportedError, "elements of type"),
    ],
)
def test_wrong_arguments_leave_the_group_usable(
    call: Callable[[Communicator], Any], error: type[Exception], text: str, threads: World
) -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(error, match=text):
            call(comm)
        assert comm.all_reduce(np.ones(1)).tolist() == [2]

    threads(2).run(check)


def test_scatter_needs_x_on_the_root_and_out_elsewhere() -> None:
    def check(comm: Communicator) -> None:
        if comm.rank == 1:
            with pytest.raises(ValueError, match="scatter needs out"):
                comm.scatter(None)
        else:
            with pytest.raises(ValueError, match="scatter needs x"):
                comm.scatter(None, np.ones(2))

    with Threads(2) as world:
        world.run(check)


def test_explain_names_the_algorithm_that_runs(threads: World) -> None:
    comm = threads(4).comms[1]
    for op in Op:
        if op is Op.BARRIER:
            continue
        for nbytes in (8, 1 << 20):
            found = comm.explain(op, nbytes)
            assert found.algorithm.partition(":")[0] in algorithms.names(op)
            assert found.algorithm in str(found) and str(nbytes) in str(found)
    assert comm.explain("barrier", 0).algorithm == "direct"
