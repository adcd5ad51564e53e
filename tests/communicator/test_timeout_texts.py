"""Texts of timeouts: programs, and torch's own tests, search for ` timeout ` with its spaces."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranks import Threads, unique_name
from unisono import Communicator, RendezvousError, Work, init

_SEARCHED = re.compile(r" (Timed out|closed|timeout) ")  # the expression of torch's own tests
_LIMIT_S = 0.1


def _x() -> np.ndarray[Any, Any]:
    return np.ones(4)


_ENDED_CALLS: dict[str, Callable[[Communicator], Any]] = {
    "all_reduce": lambda comm: comm.all_reduce(_x()),
    "all_gather": lambda comm: comm.all_gather(_x()),
    "all_to_all": lambda comm: comm.all_to_all(_x()),
    "barrier": lambda comm: comm.barrier(),
    "broadcast": lambda comm: comm.broadcast(_x(), root=1),
    "async": lambda comm: comm.all_reduce(_x(), async_op=True).wait(),
    "recv": lambda comm: comm.recv(_x(), 1),
    "send": lambda comm: comm.send(np.ones(1 << 20), 1),
    "sendrecv": lambda comm: comm.sendrecv(np.ones(4), 1, np.ones(4), 1),
    "wait_all": lambda comm: Work.wait_all(
        [comm.recv(_x(), 1, tag, async_op=True) for tag in (1, 2)]
    ),
}
_CALLS_THAT_GO_ON: dict[str, Callable[[Communicator], Any]] = {
    "probe": lambda comm: comm.probe(1, timeout_s=_LIMIT_S),
    "work": lambda comm: comm.all_reduce(_x(), async_op=True).wait(_LIMIT_S),
    "message": lambda comm: comm.recv(_x(), 1, async_op=True).wait(_LIMIT_S),
    "any": lambda comm: Work.wait_any([comm.recv(_x(), 1, async_op=True)], _LIMIT_S),
    "any_mixed": lambda comm: Work.wait_any(
        [comm.recv(_x(), 1, async_op=True), comm.all_reduce(_x(), async_op=True)], _LIMIT_S
    ),
}


def _text_on_rank_0(call: Callable[[Communicator], Any], timeout_s: float) -> str:
    """Returns the text of the timeout of rank 0's call, which rank 1 never makes."""

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.timeout_s = timeout_s
            call(comm)

    ranks = Threads(2)
    try:
        error = ranks.outcomes(body)[0]
    finally:
        ranks.close()
    assert isinstance(error, TimeoutError)
    return str(error)


@pytest.mark.parametrize("name", _ENDED_CALLS)
def test_a_late_call_names_the_time_and_the_rank(name: str) -> None:
    text = _text_on_rank_0(_ENDED_CALLS[name], _LIMIT_S)
    assert _SEARCHED.search(text) and ": timeout after 0.1 s on rank 0: " in text, text


@pytest.mark.parametrize("name", _CALLS_THAT_GO_ON)
def test_a_wait_with_a_limit_of_its_own_names_the_time(name: str) -> None:
    text = _text_on_rank_0(_CALLS_THAT_GO_ON[name], 30.0)
    assert _SEARCHED.search(text + " ") and text.endswith(": timeout after 0.1 s"), text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bootstrap_without_the_other_ranks_names_the_time(rank: int) -> None:
    with pytest.raises(RendezvousError, match=_SEARCHED):
        init(rank=rank, size=2, rendezvous=unique_name(), timeout_s=_LIMIT_S)
