"""MLX's collectives between CPU processes, on Unisono.

Import this package before the first use of `mlx.core.distributed`:

    import unisono.mlx
    import mlx.core as mx

    group = mx.distributed.init()  # ranks of unisono.run, torchrun, mpiexec, srun or mlx.launch

`all_sum`, `all_max`, `all_min`, `all_gather`, `send`, `recv` and `split` then run on Unisono. The
wheels of MLX are used unchanged: their MPI collectives load `libunisono_open_mpi.so`.
"""

from unisono.mlx.installation import Installation

_INSTALLATION = Installation()

__all__: list[str] = []
