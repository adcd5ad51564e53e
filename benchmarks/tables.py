"""Readers of tables of published measurements and formulas. Tables are CSV files whose comments (#)
name the sources.
"""

from __future__ import annotations

import csv
from pathlib import Path

from unisono.simulator.measurement_files import Sample

SIMULATOR = Path(__file__).parents[1] / "tests" / "simulator" / "tables"


def rows(table: Path) -> list[dict[str, str]]:
    """Returns a table's rows, each as a dictionary by column name."""
    lines = table.read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def nccl() -> list[Sample]:
    """Returns NCCL's published out-of-place times on A100."""
    return [
        Sample(
            op="all_reduce",
            ranks=int(row["nranks"]),
            nbytes=float(row["bytes"]),
            seconds=float(row["oop_ns"]) * 1e-9,
            contestant="nccl",
        )
        for row in rows(SIMULATOR / "nccl_all_reduce.csv")
        if row["gpu"] == "a100"
    ]
