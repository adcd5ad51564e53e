"""Measures the way from a wheel to the first call: pip, import, init, all_reduce.

    make wheels && python benchmarks/install_time.py --out results/install-time.json

Each round makes an environment without a compiler and installs the wheel of dist/ as README.md
says. pip takes what the wheel needs from the index that it is set up with, or from its cache.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

HERE = Path(__file__).parent
PROGRAM = """
import time, numpy as np
start_s = time.perf_counter()
import unisono
imported_s = time.perf_counter() - start_s
def first_call():
    begin_s = time.perf_counter()
    with unisono.init() as comm:
        ready_s = time.perf_counter() - begin_s
        x = np.ones(4)
        comm.all_reduce(x)
        return ready_s, x.tolist()
if __name__ == "__main__":
    (first_s, x), (second_s, y) = unisono.run(first_call, ranks=2)
    assert x == y == [2.0] * 4
    print(imported_s, min(first_s, second_s), max(first_s, second_s))
"""


def measure(wheels: Path) -> dict[str, float]:
    """Returns the seconds of each part of one round."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        programs = Path(folder) / "bin"
        path = Path(folder) / "first_call.py"
        path.write_text(PROGRAM)
        variables = {**os.environ, "PATH": str(programs)}  # no compiler
        assert shutil.which("c++", path=variables["PATH"]) is None
        pip = [programs / "pip", "install", "--quiet", "--find-links", wheels, "unisono"]
        start_s = time.perf_counter()
        subprocess.run(pip, env=variables, check=True)
        installed_s = time.perf_counter() - start_s
        done = subprocess.run(
            [programs / "python", path], env=variables, check=True, stdout=subprocess.PIPE
        )
        total_s = time.perf_counter() - start_s
    imported_s, first_s, last_s = map(float, done.stdout.split())
    return {
        "pip_s": installed_s, "import_s": imported_s, "first_ready_s": first_s,
        "last_ready_s": last_s, "program_s": total_s - installed_s, "total_s": total_s,
    }  # fmt: skip


def main(
    *,
    wheels: Annotated[Path, typer.Option(help="Folder of the wheels.")] = HERE.parent / "dist",
    rounds: Annotated[int, typer.Option(help="Number of environments.")] = 3,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    found: list[dict[str, Any]] = []
    for number in range(rounds):
        found.append(measure(wheels))
        typer.echo(f"round {number}: {json.dumps(found[-1])}")
    if out:
        out.write_text(json.dumps({"rounds": found}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
