"""Runs the measurements for the performance targets between hosts, on lab hosts (requires root).
Writes one JSON file per part.

Parts with a file in the results folder are not measured again. `python benchmarks/write_pages.py`
writes the page.

    python benchmarks/hosts.py              # all parts, about 20 minutes
    python benchmarks/hosts.py --only flat  # one of them
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).parent
UNISONO = Path(sys.executable).parent / "unisono"
CAPPED = ("--rate", "1gbit", "--against", "gloo,openmpi")
PARTS: dict[str, tuple[str, ...]] = {
    "flat": ("--hosts", "4", "--sizes", "8,64K,1M,16M,32M", *CAPPED),
    "pairs": ("--hosts", "2", "--per-host", "2", "--sizes", "1M,16M", *CAPPED),
    "wide": ("--hosts", "4", "--per-host", "2", "--sizes", "1M,16M", *CAPPED),
    "one-rail": ("--hosts", "2", "--sizes", "1M,16M,64M", *CAPPED),
    "two-rails": ("--hosts", "2", "--rails", "2", "--sizes", "1M,16M,64M", *CAPPED),
    "uncapped": ("--hosts", "2", "--sizes", "64M", "--against", "gloo,openmpi"),
}


def main(
    *,
    only: Annotated[str, typer.Option(help="Parts, separated by commas.")] = ",".join(PARTS),
    rounds: Annotated[
        int, typer.Option(help=("Measurement rounds; in each, every contestant runs once."))
    ] = 7,
    folder: Annotated[Path, typer.Option(help="Folder of the parts.")] = HERE / "results",
) -> None:
    for name in only.split(","):
        path = folder / f"hosts-{name}.json"
        if path.exists():
            continue
        command = [str(UNISONO), "bench", "all_reduce", *PARTS[name]]
        partial = path.with_suffix(".partial")
        command += [
            "--rounds",
            str(rounds),
            "--json",
            partial.name,
        ]  # the result records this command
        subprocess.run(command, check=True, cwd=folder)
        partial.rename(path)


if __name__ == "__main__":
    typer.run(main)
