"""One run of a framework's program."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from frameworks import STAND_IN, Framework

PROGRAMS = Path(__file__).parent / "programs"
VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def trained(framework: Framework, python: str | Path, ranks: int, served_by: str) -> dict[str, Any]:
    """Runs a framework's program once and returns the record that it prints.

    `served_by` is "torch" or "unisono". Raises `RuntimeError` if the program fails or is not served
    by the library that was asked for.
    """
    done = subprocess.run(
        _command(framework, python, ranks),
        env=_variables(framework, served_by), capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode != 0 or len(lines) != 1:
        raise RuntimeError(f"{framework.name}, {ranks} ranks, {served_by}:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    said = done.stderr.count("unisono serves the CPU tensors of groups that ask torch for gloo")
    expected = served_by == "unisono" and framework.chosen_by == STAND_IN
    if result["served_by"] != served_by or said != expected:
        raise RuntimeError(
            f"{framework.name}: expected {served_by}, found {result['served_by']}, said {said} "
            f"times\n{done.stderr[-4000:]}"
        )
    return result


def _command(framework: Framework, python: str | Path, ranks: int) -> list[str]:
    program = str(PROGRAMS / framework.program)
    if not framework.launcher:
        return [str(python), program, str(ranks)]
    return [str(python), "-m", *framework.launcher, str(ranks), program]


def _variables(framework: Framework, served_by: str) -> dict[str, str]:
    variables = {**os.environ, **VARIABLES, **framework.variables}
    name, value = framework.chosen_by
    for each in (name, STAND_IN[0]):
        variables.pop(each, None)
    if served_by == "unisono":
        variables[name] = value
    return variables
