"""Reads a process's rank, the number of ranks and the rendezvous from its launcher's variables."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from unisono.config.host_list import hosts
from unisono.config.variable_parsing import number, text
from unisono.errors import RendezvousError

TCP = "tcp://"
"""Prefix of a rendezvous at which rank 0 listens: tcp://host:port."""
TORCH_STORE = "torch-store:"
"""Prefix of a rendezvous through the store that torch's variables denote."""
MPI = "mpi:"
"""Prefix of a rendezvous through MPI. MPI also carries the data between hosts."""
DERIVED_PORTS = range(61440, 65536)
"""Ports of a rendezvous for which the launcher names only the host."""

_CREDENTIALS = struct.Struct("3i")  # struct ucred of Linux: the IDs of process, user and group
_MPIEXEC = re.compile(r"prte(?:run)?-(?P<host>.+)-(?P<pid>\d+)@\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """Rank of this process, the number of ranks, and the rendezvous.

    `rendezvous` is equal on all ranks. It is `tcp://host:port`, at which rank 0 listens, or
    `torch-store:` and a text, or `mpi:`. Any other text is unique to the job and means that all
    ranks are on one host.
    """

    rank: int
    size: int
    rendezvous: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """Values that a launcher gave to this rank."""

    launcher: str
    rank: int
    size: int
    local: int
    """Number of ranks on this host."""
    job: str
    """The rendezvous if all ranks are on this host."""
    place: Callable[[], str | None]
    """Function that returns the rendezvous of ranks on several hosts, or None if the launcher does
    not name rank 0's host."""


def world(environ: Mapping[str, str]) -> LaunchedRank:
    """Returns the rank, the number of ranks and the rendezvous that the innermost launcher set.

    If `UNISONO_RENDEZVOUS` is `tcp://host:port`, it is the rendezvous, whichever launcher started
    the ranks. With `UNISONO_WIRE=mpi`, the rendezvous is MPI. Raises `RendezvousError` if no
    launcher is recognised, or if the launcher names no rendezvous.
    """
    found = world_if_launched(environ)
    if found is None:
        raise RendezvousError(
            "no rank given: call init(rank=, size=, rendezvous=), use unisono.run, or start the "
            "program with torchrun, mpiexec, srun or mlx.launch (or set UNISONO_RANK, "
            "UNISONO_SIZE and UNISONO_RENDEZVOUS)"
        )
    return found


def world_if_launched(environ: Mapping[str, str]) -> LaunchedRank | None:
    """Returns what `world` returns, or None if no launcher is recognised."""
    if "UNISONO_RANK" in environ:
        return LaunchedRank(
            rank=number(environ, "UNISONO_RANK"),
            size=number(environ, "UNISONO_SIZE"),
            rendezvous=text(environ, "UNISONO_RENDEZVOUS"),
        )
    for launcher in (_mlx_launch, _torchrun, _open_mpi, _mpich, _slurm):
        found = launcher(environ)
        if found is not None:
            return LaunchedRank(
                rank=found.rank, size=found.size, rendezvous=_rendezvous(found, environ)
            )
    return None


def _rendezvous(found: _Launch, environ: Mapping[str, str]) -> str:
    if environ.get("UNISONO_WIRE") == "mpi":
        return MPI
    given = environ.get("UNISONO_RENDEZVOUS", "")
    if given.startswith(TCP):
        return given
    if found.local == found.size:
        return found.job
    place = found.place()
    if place is None:
        raise RendezvousError(
            f"{found.launcher} started {found.size} ranks on several hosts, but does not name "
            "rank 0's host: set UNISONO_RENDEZVOUS=tcp://HOST:PORT, equal on all ranks, "
            "where HOST is rank 0's host and PORT is a free port there"
        )
    return place


def _mlx_launch(environ: Mapping[str, str]) -> _Launch | None:
    """Reads the variables of `mlx.launch` with its ring, which names the addresses of each rank."""
    if "MLX_RANK" not in environ or "MLX_HOSTFILE" not in environ:
        return None
    with open(environ["MLX_HOSTFILE"], encoding="utf-8") as file:
        content = file.read().strip()
    firsts = [str(addresses[0]) for addresses in json.loads(content)] if content else ["alone:0"]
    hosts = {each.rpartition(":")[0] for each in firsts}
    return _Launch(
        launcher="mlx.launch",
        rank=number(environ, "MLX_RANK"),
        size=len(firsts),
        local=len(firsts) if len(hosts) == 1 else 0,
        job=f"mlx.launch:{firsts[0]}",
        place=lambda: f"{TCP}{firsts[0]}",
    )


def _torchrun(environ: Mapping[str, str]) -> _Launch | None:
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    size = number(environ, "WORLD_SIZE")
    store = ":".join(
        environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    )
    return _Launch(
        launcher="torchrun",
        rank=number(environ, "RANK"),
        size=size,
        local=number(environ, "LOCAL_WORLD_SIZE", size if _is_this_host(environ) else 0),
        job=f"torchrun:{store}:{environ.get('TORCHELASTIC_RESTART_COUNT', '')}",
        # This rendezvous omits the number of restarts. Torchrun's agents on several hosts disagree
        # about the number, because an agent counts only the failures of its own ranks.
        place=lambda: f"{TORCH_STORE}{store}",
    )


def _is_this_host(environ: Mapping[str, str]) -> bool:
    """Returns True if torch's variables can only mean ranks of one host. Operators of Kubernetes
    set the number of all ranks, but not that of a host's ranks.
    """
    address = environ.get("MASTER_ADDR", "")
    return address in ("", "localhost", "::1") or address.startswith("127.")


def _open_mpi(environ: Mapping[str, str]) -> _Launch | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    size = number(environ, "OMPI_COMM_WORLD_SIZE")
    job = environ.get("PMIX_NAMESPACE") or f"parent-{os.getppid()}"
    mpiexec = _MPIEXEC.fullmatch(job)

    def place() -> str | None:
        # Slurm's variables name the hosts of the ranks. Without Slurm, only the host of mpiexec is
        # known, because the job's name contains it.
        pid = int(mpiexec["pid"]) if mpiexec else 0
        first = _first_host_of_slurm(environ) or (mpiexec and mpiexec["host"])
        return f"{TCP}{_netloc(first, _port(pid, 0))}/{job}" if first else None

    return _Launch(
        launcher="mpiexec",
        rank=number(environ, "OMPI_COMM_WORLD_RANK"),
        size=size,
        local=number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", size),
        job=f"openmpi:{job}",
        place=place,
    )


def _mpich(environ: Mapping[str, str]) -> _Launch | None:
    if "PMI_RANK" not in environ or "PMI_SIZE" not in environ:
        return None
    if "SLURM_PROCID" in environ and "MPI_LOCALNRANKS" not in environ:
        return None  # started by srun, not by an mpiexec inside a Slurm job
    size = number(environ, "PMI_SIZE")
    local = number(environ, "MPI_LOCALNRANKS", size)
    return _Launch(
        launcher="mpiexec",
        rank=number(environ, "PMI_RANK"),
        size=size,
        local=local,
        job=f"mpich:{_hydra_proxy(environ)}" if local == size else "",
        place=lambda: _in_slurm(environ, "mpich", len(DERIVED_PORTS) // 2),
    )


def _hydra_proxy(environ: Mapping[str, str]) -> int:
    """Returns the process ID (pid) of the launcher that started this host's ranks. The pid serves
    as the name of the job.

    Hydra, the launcher of MPICH, has no job name. The launcher is the parent process, unless a
    shell script runs in between. The launcher also created the socket through which each rank talks
    to it, and the kernel reports a socket's creator.
    """
    with contextlib.suppress(KeyError, ValueError, OSError):
        connection = socket.socket(fileno=int(environ["PMI_FD"]))
        try:
            raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        finally:
            connection.detach()  # MPI still uses the socket, so it must not be closed
        pid = int(_CREDENTIALS.unpack(raw)[0])
        if pid > 0:
            return pid
    return os.getppid()


def _slurm(environ: Mapping[str, str]) -> _Launch | None:
    if "SLURM_PROCID" not in environ:
        return None
    size = number(environ, "SLURM_STEP_NUM_TASKS", number(environ, "SLURM_NTASKS", 1))
    step = environ.get("SLURM_STEP_ID", "")
    return _Launch(
        launcher="srun",
        rank=number(environ, "SLURM_PROCID"),
        size=size,
        local=size if number(environ, "SLURM_STEP_NUM_NODES", 1) == 1 else 0,
        job=f"slurm:{environ.get('SLURM_JOB_ID', '')}.{step}",
        place=lambda: _in_slurm(environ, f"slurm.{step}", number(environ, "SLURM_STEP_ID", 0)),
    )


def _in_slurm(environ: Mapping[str, str], name: str, step: int) -> str | None:
    """Returns the rendezvous of a step (one srun) of a Slurm job, on the step's first host, where
    rank 0 runs. Returns None if Slurm's variables name no host.
    """
    first = _first_host_of_slurm(environ)
    if first is None:
        return None
    job = number(environ, "SLURM_JOB_ID", 0)
    return f"{TCP}{_netloc(first, _port(job, step))}/{name}.{job}"


def _first_host_of_slurm(environ: Mapping[str, str]) -> str | None:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            try:
                return next(hosts(environ[name]))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return None


def _port(job: int, step: int) -> int:
    """Returns a port for a job step. Concurrent jobs and steps rarely get the same port."""
    return DERIVED_PORTS[(job + 509 * step) % len(DERIVED_PORTS)]


def _netloc(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
