"""Runs the checks of a test module in worlds of ranks, and reports each check as a test.

A module sets `RANKS`. It defines functions `check_*(world)`, which run on unisono and gloo, and
`own_*(world)`, which run on unisono only. Its only test takes the fixture `outcome`. `BACKENDS`
lists further backends. `HOSTS` names the host of each rank, for ranks that act as those of several
hosts. All checks of a module share one world per backend, since starting ranks
takes seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")

from worlds.forked import start
from worlds.torch_version import SKIPPED

_RANK_FILE = str(Path(__file__).parent / "world_rank.py")
_REPORT_S = 10.0
"""Time that is left of a test's time limit when a world must have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one check, with the errors of each rank."""

    check: str
    ranks: int
    errors: dict[int, str]

    def require_success(self) -> None:
        """Fails with the text of every rank that failed. Skips the test if all ranks skipped it."""
        skipped = [text for text in self.errors.values() if text.startswith(SKIPPED)]
        if len(skipped) == self.ranks:
            pytest.skip(skipped[0].removeprefix(SKIPPED))
        if self.errors:
            texts = [f"--- rank {rank}\n{text}" for rank, text in sorted(self.errors.items())]
            pytest.fail("\n".join([self.check, *texts]), pytrace=False)


@dataclass(slots=True, kw_only=True)
class Worlds:
    """The outcomes of worlds (groups of ranks), by module, backend and check. Each world runs only
    once.
    """

    folder: Callable[[], Path]
    limit_s: float
    """Time limit of a world. A longer one would end the test, and each next test would begin the
    world again."""
    done: dict[tuple[str, str], dict[str, Outcome]] = field(default_factory=dict)

    def outcome(self, module: ModuleType, backend: str, check: str) -> Outcome:
        """Returns the outcome of a check. Runs the world of the check's module on first use."""
        key = (str(module.__file__), backend)
        if key not in self.done:
            self.done[key] = _run_world(module, backend, self.folder(), self.limit_s)
        return self.done[key][check]


def check_names(module: ModuleType, backend: str) -> list[str]:
    """Returns the names of a module's checks for a backend, in the order of the source."""
    prefixes = ("check_", "own_") if "unisono" in backend else ("check_",)
    return [name for name in vars(module) if name.startswith(prefixes)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "outcome" in metafunc.fixturenames:
        cases = [
            (backend, check)
            for backend in getattr(metafunc.module, "BACKENDS", ("unisono", "gloo"))
            for check in check_names(metafunc.module, backend)
        ]
        metafunc.parametrize("outcome", cases, indirect=True, ids=[f"{c}-{b}" for b, c in cases])


@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    limit_s = float(request.config.getoption("timeout") or request.config.getini("timeout"))
    return Worlds(
        folder=lambda: tmp_path_factory.mktemp("world"), limit_s=max(limit_s - _REPORT_S, _REPORT_S)
    )


@pytest.fixture
def outcome(request: pytest.FixtureRequest, worlds: Worlds) -> Outcome:
    backend, check = request.param
    return worlds.outcome(request.module, backend, check)


def _run_world(
    module: ModuleType, backend: str, folder: Path, limit_s: float
) -> dict[str, Outcome]:
    ranks: int = module.RANKS
    processes = [
        start(
            _RANK_FILE, "main", str(module.__file__), backend, rank, ranks, folder,
            log=folder / f"{rank}.log", environment=_environment(module, rank),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    for process in processes:
        process.kill()
        process.join()
    errors = [_errors_of_rank(folder, rank) for rank in range(ranks)]
    unfinished = [(folder / f"{rank}.log").read_text()[-3000:] for rank in range(ranks)]
    outcomes = {}
    for check in check_names(module, backend):
        failed = {}
        for rank in range(ranks):
            text = errors[rank].get(check, f"did not finish\n{unfinished[rank]}")
            if text:
                failed[rank] = text
        outcomes[check] = Outcome(check=check, ranks=ranks, errors=failed)
    return outcomes


def _environment(module: ModuleType, rank: int) -> dict[str, str]:
    hosts = getattr(module, "HOSTS", None)
    return {} if hosts is None else {"UNISONO_HOST_ID": hosts[rank], "UNISONO_INTERFACE": "=lo"}


def _errors_of_rank(folder: Path, rank: int) -> dict[str, str]:
    path = folder / f"{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {entry["check"]: entry["error"] for entry in map(json.loads, lines)}
