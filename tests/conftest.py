"""Fixtures for all tests of this project."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

import unisono.native

if TYPE_CHECKING:
    from ranks import Threads

# No test may fail because the machine is slow.
settings.register_profile("unisono", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unisono")

unisono.native.usable_cores()  # loads the native core, and builds it if its sources have changed
os.environ["CORE_IS_BUILT"] = "1"  # the Makefile describes it

_LAUNCHER_VARIABLES = (
    "UNISONO_RANK", "UNISONO_SIZE", "UNISONO_RENDEZVOUS", "UNISONO_TIMEOUT_S",
    "UNISONO_STAGING_BYTES", "UNISONO_STORES", "UNISONO_REPRODUCIBLE", "UNISONO_SELECTION",
    "UNISONO_ALGORITHM", "UNISONO_JOB_SECRET", "UNISONO_JOB_SECRET_FILE", "UNISONO_PORTS",
    "UNISONO_PEER_TIMEOUT_S", "UNISONO_STREAMS",
    "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `program(*names)`, with the reason, if none of these programs exists."""
    for item in items:
        for marker in item.iter_markers("program"):
            if not any(map(shutil.which, marker.args)):
                reason = f"needs the program {marker.args[0]}, which is not installed"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skips tests of features that unisono refuses on this version of torch, with the refusal."""
    try:
        return (yield)
    except Exception as error:
        if "needs torch" not in str(error):
            raise
        from worlds.torch_version import refusal  # imported here, since it imports torch

        if reason := refusal(error):
            pytest.skip(reason)
        raise


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the launcher's and the user's settings from the environment of every test."""
    for name in _LAUNCHER_VARIABLES:
        if name in os.environ:
            monkeypatch.delenv(name)
    # The user's cache folder may contain a file that `unisono tune` made for this machine.
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")


@pytest.fixture(autouse=True)
def needs_lab(request: pytest.FixtureRequest) -> None:
    """Skips tests marked `lab`, with the reason, if this machine cannot run a lab."""
    if request.node.get_closest_marker("lab") is not None:
        from unisono.bench.lab import reason_unavailable

        if reason := reason_unavailable():
            pytest.skip(reason)


@pytest.fixture(autouse=True, scope="session")
def lower_once() -> Iterator[None]:
    """Builds and lowers each schedule only once for all ranks that are threads of this process."""
    from shared_lowering import shared

    with shared():
        yield


@pytest.fixture(scope="session")
def threads() -> Iterator[Callable[[int], Threads]]:
    """Returns a function `threads(n)` that returns n ranks as threads. All tests of a session share
    them. Ranks whose communicator has failed are replaced.
    """
    from ranks import Threads  # imported here, since the import needs the native core

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
