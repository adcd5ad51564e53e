"""Trains with each framework over Gloo and over Unisono in turn, and writes docs/frameworks.md.

    python benchmarks/integrations/run.py                # all frameworks
    python benchmarks/integrations/run.py accelerate     # some, by the folder of the environment
    python benchmarks/integrations/run.py --test         # tests/integrations in each environment
    python benchmarks/integrations/run.py --table        # only the table, from saved results

The framework's program is the same for both; a variable of the environment is the only difference.
The first run of a framework makes its environment (about two minutes each).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
from environments import ROOT, make_environment, make_wheel, version_of
from frameworks import FRAMEWORKS, TORCH, Framework
from program_run import trained
from table import QUIET, write_table

RESULTS = ROOT / "benchmarks" / "results" / "integrations.json"
RANKS = (2, 4)
WARM_UP = 10
"""Steps at the start whose times are not counted."""
_WATCHED_S = 2.0
TRIES = 4
"""Runs of a program, of which one has to succeed."""


def main() -> None:
    """Runs the frameworks that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *(one.folder for one in FRAMEWORKS)])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wait-s", type=float, default=300.0, help="for a quiet machine")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--test", action="store_true")
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not arguments.table:
        wheel = make_wheel()
        for framework in FRAMEWORKS:
            if arguments.names and framework.folder not in arguments.names:
                continue
            python = make_environment(framework, wheel)
            if arguments.test:
                tested(framework, python)
                continue
            results[framework.name] = measured(
                framework, python, arguments.rounds, arguments.wait_s
            )
            RESULTS.write_text(json.dumps(results) + "\n")
    write_table(ROOT / "docs" / "frameworks.md", results, FRAMEWORKS)


def busy_when_quiet(wait_s: float) -> float:
    """Returns the percentage of the CPUs that other programs use, after at most `wait_s` seconds in
    which they used too much."""
    deadline = time.monotonic() + wait_s
    while (busy := psutil.cpu_percent(_WATCHED_S)) >= QUIET and time.monotonic() < deadline:
        pass
    return busy


def measured(framework: Framework, python: Path, rounds: int, wait_s: float) -> dict[str, Any]:
    """Returns the losses and step times of a framework at each number of ranks."""
    found: dict[str, Any] = {
        "version": version_of(python, framework.package), "torch": TORCH, "ranks": {},
    }  # fmt: skip
    for ranks in RANKS:
        runs: dict[str, list[dict[str, Any]]] = {"torch": [], "unisono": []}
        crashes = {"torch": 0, "unisono": 0}
        busy = []
        for _ in range(rounds):  # in turn, so that other load of the machine meets both
            busy.append(busy_when_quiet(wait_s))
            for served_by, one in runs.items():
                found_run, failed = repeated(framework, python, ranks, served_by)
                one.append(found_run)
                crashes[served_by] += failed
        found["ranks"][ranks] = {"busy": max(busy)} | {
            served_by: {
                "losses": one[0]["losses"],
                "crashes": crashes[served_by],
                "step_ms": [round(1e3 * s, 3) for run in one for s in run["step_s"][WARM_UP:]],
            }
            for served_by, one in runs.items()
        }
        print(framework.name, ranks, "ranks done", flush=True)
    return found


def repeated(
    framework: Framework, python: Path, ranks: int, served_by: str
) -> tuple[dict[str, Any], int]:
    """Runs a program until it succeeds; returns its record and the number of failures, which the
    table states. Raises the error of the last try.
    """
    for failures in range(TRIES - 1):
        try:
            return trained(framework, python, ranks, served_by), failures
        except RuntimeError as error:
            print(error, flush=True)
    return trained(framework, python, ranks, served_by), TRIES - 1


def tested(framework: Framework, python: Path) -> None:
    """Runs the suite's tests of a framework in its environment."""
    tests = [str(python), "-m", "pytest", "-q", "-W", "default", "tests/integrations"]
    subprocess.run([*tests, "-k", framework.folder], cwd=ROOT, check=True, timeout=1800)


if __name__ == "__main__":
    main()
