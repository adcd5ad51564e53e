"""Injects every fault between hosts, 50 rounds each (requires root, half an hour): `python
benchmarks/faults.py`.

This program runs the slow test of tests/lab/test_faults.py. In every round, each survivor must name
the lost ranks in time, and no files or processes may remain. Events that lose no rank must have no
effect. Messages in all phases (tests/lab/traffic.py) run concurrently with the calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Annotated, Any

import typer

from unisono.bench.machine_facts import describe_machine

HERE = Path(__file__).parent
TESTS = "tests/lab/test_faults.py"
UNDER_WAY = "calls and messages of all phases"


def results(report: Path) -> list[dict[str, Any]]:
    """Returns for each fault the total time, and whether all rounds ended as specified."""
    return [
        {
            "fault": case.attrib["name"].partition("[")[2].rstrip("]"),
            "as_specified": len(case) == 0,  # True if the case has no failure, error or skip
            "seconds": float(case.attrib["time"]),
        }
        for case in xml.parse(report).iter("testcase")
    ]


def main(
    *,
    only: Annotated[str, typer.Option(help="Selection of faults, as for pytest -k.")] = "",
    jobs: Annotated[int, typer.Option(help="Number of concurrent faults.")] = 2,
    path: Annotated[Path, typer.Option(help="Results.")] = HERE / "results" / "faults.json",
) -> None:
    wanted = f"fifty and ({only})" if only else "fifty"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", TESTS, "-k", wanted]
        command += ["-n", str(jobs), "--dist", "load", f"--junitxml={report}"]
        env = os.environ | {"UNISONO_TESTS_ON_IDLE_MACHINE": "1"}
        ended = subprocess.run(command, cwd=HERE.parent, env=env, check=False)
        found = results(report)
    write(path, found)
    raise typer.Exit(ended.returncode)


def write(path: Path, found: list[dict[str, Any]]) -> None:
    """Writes the results of these faults to the file. Keeps the results of other faults in the
    file, if these faults were measured during the same traffic.
    """
    before = json.loads(path.read_text()) if path.exists() else {}
    kept = before["faults"] if before.get("under_way") == UNDER_WAY else []
    faults = {each["fault"]: each for each in (*kept, *found)}
    document = {
        "machine": describe_machine(),
        "under_way": UNDER_WAY,
        "faults": list(faults.values()),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
