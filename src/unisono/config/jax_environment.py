"""The environment variables with which jax loads a library as its MPI."""

from __future__ import annotations

import os
import sys

from unisono.errors import UnsupportedError

_COLLECTIVES, _LIBRARY = "JAX_CPU_COLLECTIVES_IMPLEMENTATION", "MPITRAMPOLINE_LIB"


def prepare_jax(library: str) -> None:
    """Lets jax load `library` as its MPI. Call before jax is imported.

    Raises `UnsupportedError` if jax is imported, or if the program wants other collectives.
    """
    for name, expected in ((_COLLECTIVES, "mpi"), (_LIBRARY, library)):
        wanted = os.environ.get(name, expected)
        if wanted != expected:
            raise UnsupportedError(
                f"{name}={wanted} asks for other collectives; unset it, or do not import "
                "unisono.jax"
            )
    if "jaxlib.libjax_common" in sys.modules or "jaxlib._jax" in sys.modules:
        raise UnsupportedError(
            "jax was imported before unisono.jax, and chooses its collectives when it is imported; "
            "write `import unisono.jax` first"
        )
    os.environ |= {
        _COLLECTIVES: "mpi",
        _LIBRARY: library,
        "MPITRAMPOLINE_DLOPEN_MODE": "dlopen",
    }
