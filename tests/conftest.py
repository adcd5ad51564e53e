"""What every test of this project can ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from ranks import Threads

# No test may fail because the machine was busy with something else.
settings.register_profile("unisono", deadline=None)
settings.load_profile("unisono")

_LAUNCHER_VARIABLES = (
    "UNISONO_RANK", "UNISONO_SIZE", "UNISONO_RENDEZVOUS", "UNISONO_TIMEOUT_S",
    "UNISONO_STAGING_BYTES", "UNISONO_STORES", "UNISONO_REPRODUCIBLE", "UNISONO_SELECTION",
    "UNISONO_ALGORITHM", "UNISONO_JOB_SECRET", "UNISONO_JOB_SECRET_FILE", "UNISONO_PORTS",
    "UNISONO_PEER_TIMEOUT_S", "UNISONO_STREAMS",
    "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID",
)  # fmt: skip


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the launcher or the settings of whoever runs it."""
    for name in _LAUNCHER_VARIABLES:
        if name in os.environ:
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")  # nor what was tuned for this machine


@pytest.fixture(autouse=True)
def needs_lab(request: pytest.FixtureRequest) -> None:
    """Skips what is marked `lab` where there can be no lab, and says why."""
    if request.node.get_closest_marker("lab") is not None:
        from unisono.bench.lab import reason_unavailable

        if reason := reason_unavailable():
            pytest.skip(reason)


@pytest.fixture(autouse=True, scope="session")
def lower_once() -> Iterator[None]:
    """Ranks that are threads build a schedule and lay it out once for all, not each for itself."""
    from shared_lowering import shared

    with shared():
        yield


@pytest.fixture(scope="session")
def threads() -> Iterator[Callable[[int], Threads]]:
    """`threads(n)`: n ranks with a healthy communicator, shared by the tests of a session."""
    from ranks import Threads  # only where it is asked for: it needs the native core

    worlds: dict[int, Threads] = {}

    def world(ranks: int) -> Threads:
        found = worlds.get(ranks)
        if found is None or not found.healthy:
            if found is not None:
                found.close()
            found = worlds[ranks] = Threads(ranks)
        return found

    yield world
    for found in worlds.values():
        found.close()
