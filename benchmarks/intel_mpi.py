"""Intel MPI from PyPI, in a folder of its own: its files have the names of MPICH's.

mpi4py is that of this environment. Its wheel loads the MPI library that `MPI4PY_LIBMPI` names, and
Intel MPI has MPICH's binary interface.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from unisono.bench.contestants import INTEL_ROOT

FOLDER = Path(__file__).resolve().parents[1] / "build" / "impi"


def install_intel_mpi() -> Path:
    """Returns the folder of Intel MPI, which the first call installs with pip (130 MB)."""
    if not (FOLDER / "bin" / "mpiexec.hydra").exists():
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--ignore-installed"]
        subprocess.run([*words, "--prefix", str(FOLDER), "impi-rt"], check=True)
    return FOLDER


def intel_mpi_version() -> str:
    """Returns the version of Intel MPI in the folder `I_MPI_ROOT`, such as 2021.18.1."""
    launcher = Path(os.environ[INTEL_ROOT], "bin", "mpiexec.hydra")
    run = subprocess.run([str(launcher), "-V"], check=True, capture_output=True, text=True)
    return run.stdout.partition("Version ")[2].split()[0]
