"""A program in C that uses the ranks of a program in Python.

Covers: `unisono.h`, `unisono.get_include`, `comm.c_interface`, `unisono.group_address`,
messages and collectives in C.
Scenario: heat spreads along a rod; four ranks have a quarter of it each. The C code calls no Python
and needs no GIL. It equals NumPy on one process, bit by bit.

    python examples/smooth_in_c.py
"""

import ctypes
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

import unisono

RANKS, LENGTH, LEAST = 4, 400, 1e-3
SOURCE = Path(__file__).with_name("smooth.c")


def build(folder):
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    library = Path(folder) / "smooth.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{unisono.get_include()}", str(SOURCE), "-o", str(library), "-lm"]
    subprocess.run(command, check=True)
    return library


def rod():
    return np.concatenate([[100.0], np.zeros(LENGTH), [20.0]])


def smooth(library):
    comm = unisono.init()
    share = LENGTH // comm.size
    part = rod()[comm.rank * share : (comm.rank + 1) * share + 2].copy()
    capsule, steps, error = comm.c_interface(), ctypes.c_long(), ctypes.create_string_buffer(1024)
    status = ctypes.CDLL(str(library)).smooth(
        ctypes.c_void_p(unisono.group_address(capsule)),
        part.ctypes.data_as(ctypes.c_void_p),
        share,
        ctypes.c_double(LEAST),
        ctypes.byref(steps),
        error,
    )
    if status:
        raise RuntimeError(error.value.decode())
    whole = comm.gather(part[1:-1])
    comm.close()
    return steps.value, whole


def smooth_alone():
    x, steps, change = rod(), 0, LEAST
    while change >= LEAST:
        new = (x[:-2] + x[1:-1] + x[2:]) / 3
        change = np.abs(new - x[1:-1]).max()
        x[1:-1] = new
        steps += 1
    return steps, x[1:-1]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        steps, whole = unisono.run(smooth, ranks=RANKS, args=(build(folder),))[0]
    expected_steps, expected = smooth_alone()
    assert steps == expected_steps and (whole == expected).all()
    print(f"{RANKS} ranks: {steps} steps, the same temperatures as one process")
