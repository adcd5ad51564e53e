"""The environment variables with which jax loads the collectives of Unisono."""

from __future__ import annotations

import os
import sys

from unisono.errors import UnsupportedError

_COLLECTIVES = "JAX_CPU_COLLECTIVES_IMPLEMENTATION"


def prepare_environment(library: str) -> None:
    """Lets jax load `library` as its MPI. Call before jax is imported.

    Raises `UnsupportedError` if jax is imported, or if the program wants other collectives.
    """
    wanted = os.environ.get(_COLLECTIVES, "mpi")
    if wanted != "mpi":
        raise UnsupportedError(
            f"{_COLLECTIVES}={wanted} asks for other collectives; unset it, or do not import "
            "unisono.jax"
        )
    if "jaxlib.libjax_common" in sys.modules or "jaxlib._jax" in sys.modules:
        raise UnsupportedError(
            "jax was imported before unisono.jax, and chooses its collectives when it is imported; "
            "write `import unisono.jax` first, or set the variables that docs/jax.md lists"
        )
    os.environ |= {
        _COLLECTIVES: "mpi",
        "MPITRAMPOLINE_LIB": library,
        "MPITRAMPOLINE_DLOPEN_MODE": "dlopen",
    }
