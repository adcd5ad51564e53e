"""JAX's collectives between CPU processes, on Unisono.

Import this package before jax:

    import unisono.jax
    import jax

    unisono.jax.initialize()  # or jax.distributed.initialize(...)

`psum`, `all_gather`, `ppermute` and the others, and the collectives that `jit` inserts, then run on
Unisono. The wheels of jax are used unchanged: their MPI collectives load `libunisono_mpi.so`.
"""

from unisono import config
from unisono.jax.world import World
from unisono.mpi_library import MpiLibrary

_WORLD = World()
_LIBRARY = MpiLibrary("libunisono_mpi.so", _WORLD.join, _WORLD.refusal)
config.prepare_jax(_LIBRARY.path)
initialize = _WORLD.initialize

__all__ = ["initialize"]
