"""Measures all_reduce through the C interface beside calls from Python.

    python benchmarks/c_interface.py --save benchmarks/results/c-interface.json

Both run in the same processes and take turns. Every result is checked.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

import unisono
from unisono.bench.machine_facts import describe_machine

HERE = Path(__file__).parent
SIZES = {8: 20_000, 1 << 16: 3000, 1 << 20: 300}
"""By bytes: the number of calls in a round."""


def build(folder: str) -> str:
    """Compiles the loop in C; returns the library's path."""
    library = str(Path(folder) / "call_loop.so")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    command = [compiler, "-O2", "-shared", "-fPIC", f"-I{unisono.get_include()}"]
    subprocess.run([*command, str(HERE / "call_loop.c"), "-o", library], check=True)
    return library


def body(library: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds of a call by size, from C and from Python."""
    loop = ctypes.CDLL(library).call_loop
    loop.restype = ctypes.c_double
    found: dict[str, dict[str, list[float]]] = {}
    with unisono.init() as comm:
        capsule = comm.c_interface()
        group, error = unisono.group_address(capsule), ctypes.create_string_buffer(1024)
        for nbytes, calls in SIZES.items():
            x = np.zeros(nbytes // 4, np.float32)

            def from_c(x: Any = x, calls: int = calls) -> float:
                found_s: float = loop(
                    ctypes.c_void_p(group),
                    x.ctypes.data_as(ctypes.c_void_p),
                    ctypes.c_uint64(x.size),
                    calls,
                    error,
                )
                assert found_s > 0, error.value
                return found_s

            def from_python(x: Any = x, calls: int = calls) -> float:
                begin_s = time.perf_counter()
                for _ in range(calls):
                    comm.all_reduce(x)
                return (time.perf_counter() - begin_s) / calls

            kinds = {"C": from_c, "Python": from_python}
            rows = found[str(nbytes)] = {kind: [] for kind in kinds}
            for number in range(rounds + 1):
                for kind in list(kinds)[:: 1 - 2 * (number % 2)]:
                    comm.barrier()
                    seconds = kinds[kind]()
                    if number:  # the first round warms up
                        rows[kind].append(seconds)
            x[:] = comm.rank + 1
            assert from_c(calls=1) > 0 and (x == comm.size * (comm.size + 1) / 2).all()
    return found


def main(
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds of each.")] = 9,
    save: Annotated[Path | None, typer.Option(help="A file for the times, as JSON.")] = None,
) -> None:
    """Measures the C interface beside Python."""
    with tempfile.TemporaryDirectory() as folder:
        found = unisono.run(body, ranks=ranks, args=(build(folder), rounds))[0]
    for nbytes, kinds in found.items():
        times = ", ".join(f"{kind} {1e6 * median(each):.2f} us" for kind, each in kinds.items())
        print(f"{ranks} ranks, {nbytes} bytes: {times}")
    if save is not None:
        document = {"machine": describe_machine(), "ranks": ranks, "rows": found}
        save.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    typer.run(main)
