"""`unisono.run`: calls a function in new ranks and returns their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono import config
from unisono.launch import local_ranks
from unisono.launch.executor import Executor


def run(
    fn: Callable[..., Any],
    ranks: int = 4,
    args: Sequence[Any] = (),
    *,
    executor: Executor | None = None,
    bind: bool = False,
) -> list[Any]:
    """Calls `fn(*args)` in `ranks` new processes and returns their results in rank order.

    In `fn`, `unisono.init()` joins the group, and so does torch's `init_process_group`: the ranks
    have torchrun's environment variables.

    Without `executor`, the ranks are processes of this machine. They are new interpreters that
    import the program. So the program must call `run` under `if __name__ == "__main__":`. Processes
    cannot import a notebook, `python -c` or standard input; in these cases `fn` is sent with all
    parts of the program that it uses. The arguments are copied.

    Each of these ranks computes with its part of the cores: `OMP_NUM_THREADS` is cores / ranks, if
    the program has not set it. With `bind`, all threads of a rank also stay on these cores, as
    under Open MPI's mpiexec. Programs whose threads wait for each other, such as those of JAX, are
    then faster; but a rank cannot leave a core that another program occupies.

    With `executor`, the executor decides on which hosts the ranks run. It is a
    `concurrent.futures.Executor`, a Dask client or anything else with the method `submit` of
    `Executor`. Each rank is a new process beside its worker. What the program's main module
    defines is sent along; other modules must be installed there, and so must unisono. The workers
    connect to this process, through the interfaces of `UNISONO_INTERFACE`. Variables `UNISONO_*` of
    this process apply to ranks whose worker does not set them.

    If a rank fails, the other ranks are ended and the first failure is raised here, with that
    rank's traceback as a note. Raises `PeerLostError` if a rank ends without a result,
    `RendezvousError` if the executor does not start all ranks within `UNISONO_TIMEOUT_S` (300 s),
    `ValueError` for less than 1 rank, more than 4096 ranks of one host, and `bind` with an
    executor, and pickle's errors for objects that cannot be copied.

    >>> import unisono
    >>> unisono.run(max, ranks=2, args=(3, 5))
    [5, 5]
    """
    most = config.MOST_RANKS if executor is None else config.MOST_RANKS**2
    if not 1 <= ranks <= most:
        where = "on one host" if executor is None else "in all"
        raise ValueError(f"ranks: expected 1 to {most} {where}, not {ranks}")
    if executor is None:
        return local_ranks.run_here(fn, ranks, args, bind=bind)
    if bind:
        raise ValueError("bind: an executor decides where ranks run; bind its workers to cores")
    if not callable(getattr(executor, "submit", None)):
        raise TypeError(
            f"executor: expected an object with a method submit(fn, *args), such as a "
            f"concurrent.futures.Executor or a Dask client, not {type(executor).__name__}"
        )
    from unisono.launch import executor_ranks  # loads the transport, which local ranks do not need

    return executor_ranks.run_on(executor, fn, ranks, args)
