"""Trains with each framework over Gloo and over Unisono in turn, and writes docs/frameworks.md.

    python benchmarks/integrations/run.py                # all frameworks
    python benchmarks/integrations/run.py accelerate     # some, by the folder of the environment
    python benchmarks/integrations/run.py --table        # only the table, from saved results

The framework's program is the same for both; `UNISONO_REPLACE=gloo` is the only difference. The
first run of a framework makes its environment (about two minutes each).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from environments import ROOT, make_environment, make_wheel, version_of
from frameworks import FRAMEWORKS, TORCH, Framework
from table import write_table

RESULTS = ROOT / "benchmarks" / "results" / "integrations.json"
RANKS = (2, 4)
VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
WARM_UP = 10
"""Steps at the start whose times are not counted."""


def main() -> None:
    """Runs the frameworks that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *(one.folder for one in FRAMEWORKS)])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not arguments.table:
        wheel = make_wheel()
        for framework in FRAMEWORKS:
            if arguments.names and framework.folder not in arguments.names:
                continue
            results[framework.name] = measured(framework, wheel, arguments.rounds)
            RESULTS.write_text(json.dumps(results) + "\n")
    write_table(ROOT / "docs" / "frameworks.md", results, FRAMEWORKS)


def measured(framework: Framework, wheel: Path, rounds: int) -> dict[str, Any]:
    """Returns the losses and step times of a framework at each number of ranks."""
    python = make_environment(framework, wheel)
    found: dict[str, Any] = {
        "version": version_of(python, framework.package), "torch": TORCH, "ranks": {},
    }  # fmt: skip
    for ranks in RANKS:
        runs: dict[str, list[dict[str, Any]]] = {"torch": [], "unisono": []}
        crashes = {"torch": 0, "unisono": 0}
        for _ in range(rounds):  # in turn, so that other load of the machine meets both
            for served_by, one in runs.items():
                try:
                    one.append(trained(framework, python, ranks, served_by))
                except RuntimeError as error:  # the table states it
                    print(error, flush=True)
                    crashes[served_by] += 1
                    one.append(trained(framework, python, ranks, served_by))
        found["ranks"][ranks] = {
            served_by: {
                "losses": one[0]["losses"],
                "crashes": crashes[served_by],
                "step_ms": [round(1e3 * s, 3) for run in one for s in run["step_s"][WARM_UP:]],
            }
            for served_by, one in runs.items()
        }
        print(framework.name, ranks, "ranks done", flush=True)
    return found


def trained(framework: Framework, python: Path, ranks: int, served_by: str) -> dict[str, Any]:
    """Runs a framework's program once and returns the record that rank 0 prints.

    Raises `RuntimeError` if the program fails or is not served by the library that was asked for.
    """
    variables = {**os.environ, **VARIABLES, **framework.variables}
    variables.pop("UNISONO_REPLACE", None)
    if served_by == "unisono":
        variables["UNISONO_REPLACE"] = "gloo"
    program = ROOT / "benchmarks" / "integrations" / "programs" / framework.program
    command = [str(python), "-m", *framework.launcher, str(ranks), str(program)]
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=600, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode != 0 or len(lines) != 1:
        raise RuntimeError(f"{framework.name}, {ranks} ranks, {served_by}:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    said = done.stderr.count("unisono serves the CPU tensors of groups that ask torch for gloo")
    if result["served_by"] != served_by or said != (served_by == "unisono"):
        raise RuntimeError(
            f"{framework.name}: expected {served_by}, found {result['served_by']}, said {said} "
            f"times\n{done.stderr[-4000:]}"
        )
    return result


if __name__ == "__main__":
    main()
