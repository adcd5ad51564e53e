"""Late ranks are named, whether a planned bucket has begun or not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ranks import Threads
from time_limits import limit_s
from unisono import Communicator
from unisono.controller import Controller

World = Callable[[int], Threads]

NAME = "gradient"


def _steps(controller: Controller, names: Sequence[str]) -> None:
    """Runs enough steps with these tensors to freeze a plan."""
    for _ in range(6):
        handles = [controller.all_reduce(name, np.full(2, controller.rank)) for name in names]
        for handle in handles:
            assert handle.wait().tolist() == [3, 3]


@pytest.mark.parametrize("planned", [[NAME, "b", "c"], [NAME]], ids=["waits", "has begun"])
def test_a_late_rank_is_named(
    threads: World, caplog: pytest.LogCaptureFixture, planned: list[str]
) -> None:
    """Tests that a query and the log name the late rank 1. In one case, the bucket has not begun,
    since tensors of rank 0 are missing too. In the other case, the bucket has begun on all ranks
    but rank 1.
    """

    def check(comm: Communicator) -> None:
        with Controller(comm, stall_warning_s=0.3) as controller:
            _steps(controller, planned)
            if comm.rank == 1:
                assert asked.wait(20)
            handle = controller.all_reduce(NAME, np.full(2, comm.rank))
            if comm.rank == 0:
                with pytest.raises(TimeoutError, match="timeout"):
                    handle.wait(0.8)
                until_s = time.monotonic() + limit_s(5)
                stalls: tuple[Any, ...] = ()
                while [each.present for each in stalls] != [(0, 2)] and time.monotonic() < until_s:
                    stalls = controller.stalls()
                assert [(each.name, each.missing) for each in stalls] == [(NAME, (1,))]
                asked.set()
            assert handle.wait().tolist() == [3, 3]
            _steps(controller, planned)

    asked = threading.Event()
    with caplog.at_level(logging.WARNING, logger="unisono.controller"):
        threads(3).run(check)
    assert "has waited for rank 1" in caplog.text


def test_a_rank_that_only_waits_hears_of_a_late_rank(
    threads: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Tests that the log names a late rank although no rank calls `stalls`. The bucket has begun on
    all other ranks.
    """

    def check(comm: Communicator) -> None:
        with Controller(comm, stall_warning_s=0.3) as controller:
            _steps(controller, [NAME])
            if comm.rank == 1:
                until_s = time.monotonic() + limit_s(10)
                while "has waited for rank 1" not in caplog.text and time.monotonic() < until_s:
                    time.sleep(0.02)
            assert controller.all_reduce(NAME, np.full(2, comm.rank)).wait().tolist() == [3, 3]

    with caplog.at_level(logging.WARNING, logger="unisono.controller"):
        threads(3).run(check)
    assert f"tensor {NAME!r} has waited for rank 1" in caplog.text
