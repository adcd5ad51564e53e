"""Makes MLX use Unisono."""

from __future__ import annotations

import atexit
import sys

from unisono import config
from unisono.communicator import Communicator, join
from unisono.errors import UnsupportedError
from unisono.mlx.functions import Functions
from unisono.mpi_library import MpiLibrary


class Installation:
    """MLX with Unisono as its MPI. Joins the group of all processes when MLX asks for it."""

    def __init__(self) -> None:
        """Raises `UnsupportedError` if MLX has another MPI."""
        self._launched = config.rank_if_launched()
        self._library = MpiLibrary("libunisono_open_mpi.so", self._join)
        config.prepare_mlx(self._library.path)

        import mlx.core as mx

        loads = mx.distributed.is_available("mpi")
        if not (loads and self._library.functions.unisono_mpi_is_in_use()):
            raise UnsupportedError(
                "mlx.core.distributed was used before unisono.mlx, and has chosen another MPI; "
                "write `import unisono.mlx` first"
            )
        self._functions = Functions(mx)

    def _join(self) -> Communicator | None:
        """Returns the group of all processes, or None if this process is alone."""
        if self._launched is None:
            return None
        comm = join(self._launched, config.settings())
        atexit.register(self._leave)  # after the communicator's, and so called before it
        return comm

    def _leave(self) -> None:
        """Waits for all collectives, as their peers do, unless an exception ends the program."""
        if not hasattr(sys, "last_value"):
            self._functions.finish()
        self._library.end()
