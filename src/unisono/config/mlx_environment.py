"""The environment variables with which MLX loads a library as its MPI."""

from __future__ import annotations

import os
import sys

from unisono.errors import UnsupportedError


def prepare_mlx(library: str) -> None:
    """Lets MLX load `library` as its MPI. Call before the first use of `mlx.core.distributed`.

    Raises `UnsupportedError` if another library of this process uses MPI.
    """
    if os.environ.get("UNISONO_WIRE") == "mpi" or "mpi4py.MPI" in sys.modules:
        raise UnsupportedError(
            "mpi4py and UNISONO_WIRE=mpi need an MPI, whose names unisono.mlx has itself: use one "
            "of them in a process"
        )
    os.environ["MLX_MPI_LIBNAME"] = library  # mlx.launch has named Open MPI's
    os.environ.pop("MLX_HOSTFILE", None)  # with it, MLX prefers its own ring
