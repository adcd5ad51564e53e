"""V-collectives with wrong counts on one rank, or with counts that differ between ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranks import Threads
from time_limits import limit_s
from unisono import Communicator, MismatchError, UnsupportedError
from unisono.errors import CommunicationError

World = Callable[[int], Threads]


# ---- wrong arguments on one rank


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c, x: c.all_gather_v(x, [3]), ValueError, "counts must be 2 numbers from 0 up"),
        (lambda c, x: c.all_gather_v(x, [3, -1]), ValueError, "from 0 up.*not"),
        (
            lambda c, x: c.all_gather_v(x, [2, 2]),
            ValueError,
            "x: expected 2 rows, as counts .*not 4",
        ),
        (lambda c, x: c.all_gather_v(x, [4.0, 4]), TypeError, "whole numbers"),
        (lambda c, x: c.all_gather_v(x, [4, 4], x), ValueError, "out: expected 8 rows.*it has 4"),
        (lambda c, x: c.all_gather_v(x, out=[x]), ValueError, "one array per rank, 2, not 1"),
        (lambda c, x: c.all_gather_v(x, [4, 4], [x, x[1:]]), ValueError, r"they have \[4, 3\]"),
        (
            lambda c, x: c.all_gather_v(x, out=np.ones(8, "f4")),
            ValueError,
            "out has .*float32.*x has .*float64",
        ),
        (
            lambda c, x: c.all_gather_v(x, out=np.ones((8, 2))),
            ValueError,
            r"out has rows of \[2\].*x has rows of \[\]",
        ),
        (lambda c, x: c.all_gather_v(np.array(1)), ValueError, "it has no dimensions"),
        (lambda c, x: c.all_gather_v([1, 2]), TypeError, "NumPy array.*not list"),
        (lambda c, x: c.all_gather_v(np.array(["a"])), UnsupportedError, "are not supported"),
        (lambda c, x: c.reduce_scatter_v(x, [2, 3]), ValueError, r"4 rows.*add up to 5: \[2, 3\]"),
        (lambda c, x: c.all_to_all_v(x, [4, 4]), ValueError, "send_counts add up to 8"),
        (lambda c, x: c.all_to_all_v(x, [[2, 2]]), ValueError, "a table of 2 rows, not 1"),
        (lambda c, x: c.all_to_all_v(x, [[2, 2]] * 2, [4, 0]), ValueError, "as send_counts say"),
        (lambda c, x: c.gather_v(x, root=2), ValueError, "root 2 is not one of the 2"),
        (lambda c, x: c.scatter_v(x, [3, 1], 5, x), ValueError, "root 5 is not one of the 2"),
        (lambda c, x: c.scatter_v(None, root=c.rank), ValueError, "needs x on the root"),
        (lambda c, x: c.scatter_v(None, root=1 - c.rank), ValueError, "needs out"),
        (lambda c, x: c.scatter_v(x, root=c.rank), ValueError, "needs counts, or out"),
        (
            lambda c, x: c.scatter_v([x, x], [4, 3], c.rank),
            ValueError,
            r"expected .*\[4, 3\] rows, as counts",
        ),
        (
            lambda c, x: c.scatter_v(None, [9, 9], 1 - c.rank, x),
            ValueError,
            "by counts rank . gets 9",
        ),
        (lambda c, x: c.all_gather_v(x, [4, 4], [x, np.ones((4, 2))]), ValueError, r"out\[1\] has"),
        (
            lambda c, x: c.all_gather_v(x, [4, 1 << 62][:: 1 - 2 * c.rank]),
            ValueError,
            "exceed any memory",
        ),
        (lambda c, x: c.all_gather_v(x, out="out"), TypeError, "out: expected a NumPy array"),
        (lambda c, x: c.reduce_scatter_v(x, None), TypeError, "counts must be .* not None"),
        (lambda c, x: c.reduce_scatter_v(x, [2, 2], x), ValueError, r"shape \(4,\).* gets 2 rows"),
        (lambda c, x: c.all_to_all_v(x, None), TypeError, "send_counts must be .* not None"),
        (lambda c, x: c.all_to_all_v(x, [[4, 0], [4]]), ValueError, r"send_counts\[1\] must be 2"),
        (
            lambda c, x: c.all_to_all_v(x, [2, 2], [2, 2], x[1:]),
            ValueError,
            "out: expected 4 rows.*it has 3",
        ),
        (
            lambda c, x: c.all_to_all_v(x, [2, 2], [2, 2], [x, x]),
            ValueError,
            r"out: .*they have \[4, 4\]",
        ),
        (lambda c, x: c.all_to_all_v(x, [2, 2], out="out"), TypeError, "out: expected a NumPy"),
        (
            lambda c, x: c.all_to_all_v(x, [2, 2], out=x.astype("f4")),
            ValueError,
            "out has rows of .* float32, but x has rows of",
        ),
        (
            lambda c, x: c.all_to_all_v(x, [2, 2], out=np.broadcast_to(x[:1], 4)),
            ValueError,
            "the array is read-only",
        ),
        (
            lambda c, x: c.all_to_all_v(x, [[2, 2]] * 2, out=x[1:]),
            ValueError,
            "out: expected 4 rows.*it has 3",
        ),
        (lambda c, x: c.all_gather_v(x, algorithm="magic"), UnsupportedError, "magic"),
    ],
)
def test_wrong_arguments_leave_the_group_usable(
    call: Callable[[Communicator, Any], Any], error: type[Exception], text: str, threads: World
) -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(error, match=text):
            call(comm, np.ones(4))
        assert comm.all_reduce(np.ones(1)).tolist() == [2]

    threads(2).run(check)


def test_forwarding_algorithms_refuse_uneven_pieces(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = np.full(2, comm.rank)
        found = comm.gather_v(x, [2] * 5, algorithm="binomial_tree")
        assert comm.rank or found.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        with pytest.raises(UnsupportedError, match="binomial_tree needs pieces of one length"):
            comm.gather_v(x[: comm.rank % 2], [0, 1, 0, 1, 0], algorithm="binomial_tree")
        with pytest.raises(UnsupportedError, match="needs pieces of one length"):
            comm.gather_v(x[: comm.rank % 2], algorithm="binomial_tree")
        found = comm.gather_v(x[: comm.rank % 2], [0, 1, 0, 1, 0])
        assert comm.rank or found.tolist() == [1, 3]

    threads(5).run(check)


# ---- disagreements between ranks

DISAGREEMENTS: dict[str, tuple[Callable[[Communicator], Any], str]] = {
    "recv_counts": (
        lambda c: c.all_to_all_v(
            np.ones(6), [1, 2, 3], [c.rank + 1, c.rank + 1, 9 if c.rank == 1 else c.rank + 1]
        ),
        r"rank 2 sends 2 elements \(16 bytes\) of float64 to rank 1, which receives 9 elements .*: "
        r"send_counts\[1\] of rank 2 and recv_counts\[2\] of rank 1 must be equal",
    ),
    "recv_counts beside a list": (
        lambda c: c.all_to_all_v(np.ones(3), [1, 1, 1], out=[np.ones(1 + (c.rank == 2))] * 3),
        r"send_counts\[2\] of rank 0 and out\[0\] of rank 2 must be equal",
    ),
    "list of a gather": (
        lambda c: c.gather_v(np.ones(2), out=[np.ones(r + 2) for r in range(3)]),
        r"which receives 3 elements .*: x of rank 1 and out\[1\] of rank 0 must be equal",
    ),
    "send_counts": (
        lambda c: c.all_to_all_v(np.ones(6), [[3, 2, 1] if c.rank else [1, 2, 3]] * 3),
        r"(rank 0 differs from rank 1, rank 2|rank [12] differs from rank 0) in the algorithm, "
        "in send_counts, or in reproducible=",
    ),
    "out of an all_to_all": (
        lambda c: c.all_to_all_v(np.ones((3, 2)), [1, 1, 1], out=np.ones((3 + (c.rank == 2), 2))),
        r"out of rank 2 has 4 rows \(64 bytes\), but the others send 3 rows \(48 bytes\)",
    ),
    "out of a gather": (
        lambda c: c.gather_v(np.ones(c.rank), out=np.ones(4)),
        r"out of rank 0 has 4 elements .*, but the others send 3 elements",
    ),
    "list of a scatter": (
        lambda c: c.scatter_v(
            [np.ones(2)] * 3 if c.rank == 0 else None, out=np.ones(2 + c.rank // 2)
        ),
        r"rank 0 sends 2 elements .* to rank 2, which receives 3 elements .*: "
        r"x\[2\] of rank 0 and out of rank 2 must be equal",
    ),
    "sum of a scatter": (
        lambda c: c.scatter_v(np.ones(7) if c.rank == 0 else None, out=np.ones(2)),
        r"x of rank 0 has 7 elements .*, but the others receive 6 elements",
    ),
    "counts": (
        lambda c: c.all_gather_v(np.ones(2), [2, 2, 2] if c.rank else [2, 2, 3]),
        r"rank 0 called all_gather\(float64\[7\], lengths from counts\), rank 1 called "
        r"all_gather\(float64\[6\], lengths from counts\)",
    ),
    "counts of one sum": (
        lambda c: c.reduce_scatter_v(np.ones(6), [1, 2, 3] if c.rank else [3, 2, 1]),
        r"(rank 0 differs from rank 1, rank 2|rank [12] differs from rank 0) in the algorithm, "
        "in counts, or in reproducible=",
    ),
    "who gives counts": (
        lambda c: c.gather_v(np.ones(2), [2, 2, 2] if c.rank == 0 else None),
        r"rank 0 called gather\(float64\[6\], lengths from counts, root=0\), rank 1 called "
        r"gather\(float64\[any\], root",
    ),
    "types": (
        lambda c: c.all_to_all_v(np.ones(3, "f4" if c.rank else "f8"), [1, 1, 1]),
        r"rank 0 called all_to_all\(float64\[any\]\), rank 1 called all_to_all\(float32\[any\]\)",
    ),
    "width of a row": (
        lambda c: c.all_gather_v(np.ones((2, 3 + (c.rank == 1)))),
        "all_gather_v: rows differ in width: rank 0 has 3 elements a row, rank 1 has 4 elements",
    ),
    "uneven gather": (
        lambda c: c.gather(np.ones(c.rank + 1), [np.ones(r + 1) for r in range(3)]),
        r"(pieces of out on root 0 have \[1, 2, 3\] elements.*call gather_v|disagree about call)",
    ),
    "uneven scatter": (
        lambda c: c.scatter(
            [np.ones(r) for r in range(3)] if c.rank == 0 else None, np.ones(c.rank)
        ),
        r"(pieces of x on root 0 have \[0, 1, 2\] elements.*call scatter_v|disagree about call)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_all_ranks_get_an_error_for_a_disagreement(name: str, later: bool) -> None:
    call, text = DISAGREEMENTS[name]

    def check(comm: Communicator) -> float:
        if later:  # an asynchronous call first, so that the progress thread detects the error
            comm.all_reduce(np.ones(1), async_op=True)
        started = time.monotonic()
        with pytest.raises(MismatchError) as caught:
            call(comm)
        assert re.search(text, str(caught.value)), str(caught.value)
        assert "gave up" not in str(caught.value)
        with pytest.raises(CommunicationError):
            comm.barrier()
        return time.monotonic() - started

    with Threads(3) as world:
        took = world.outcomes(check)
    assert all(isinstance(seconds, float) for seconds in took), took
    print(f"{name}: {max(took):.3f} s")
    assert max(took) < limit_s(1)


def test_the_wait_of_an_asynchronous_call_raises_the_disagreement() -> None:
    def check(comm: Communicator) -> str:
        out = np.full(2 + comm.rank, -1.0)
        work = comm.all_to_all_v(np.ones(2), [1, 1], out=out, async_op=True)
        with pytest.raises(MismatchError, match="out of rank 1 has 3 elements") as caught:
            work.wait()
        assert isinstance(work.exception(), MismatchError)
        assert (out == -1).all()
        return str(caught.value)

    with Threads(2) as world:
        texts = world.outcomes(check)
    assert len(set(texts)) == 1
