"""Reads the environment. Explicit arguments take precedence over all variables.

`docs/environment.md` lists the variables.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from unisono.config import launchers, variable_parsing
from unisono.types import SingleCopy, StorePolicy

World = launchers.LaunchedRank

DEFAULT_TIMEOUT_S = 300.0
DEFAULT_STAGING_BYTES = 16 << 20
DEFAULT_PEER_TIMEOUT_S = 2.5
DEFAULT_TIMELINE_EVENTS = 16384
MOST_RANKS = 4096
"""Maximum number of ranks of a host: `kMaxRanks` of csrc/memory/segment.cc."""

VARIABLES = frozenset((
    "UNISONO_RANK", "UNISONO_SIZE", "UNISONO_RENDEZVOUS", "UNISONO_TIMEOUT_S",
    "UNISONO_STAGING_BYTES", "UNISONO_STORES", "UNISONO_SINGLE_COPY", "UNISONO_REPRODUCIBLE",
    "UNISONO_ALGORITHM", "UNISONO_SELECTION", "UNISONO_JOB_SECRET", "UNISONO_JOB_SECRET_FILE",
    "UNISONO_TLS", "UNISONO_TLS_CERTIFICATE", "UNISONO_TLS_KEY", "UNISONO_TLS_CA",
    "UNISONO_PORTS", "UNISONO_PEER_TIMEOUT_S", "UNISONO_INTERFACE", "UNISONO_SOCKET_FAMILY",
    "UNISONO_RAILS", "UNISONO_HOST_ID", "UNISONO_STREAMS", "UNISONO_WIRE",
    "UNISONO_TIMELINE_EVENTS", "UNISONO_TIMELINE_DIR", "UNISONO_REPLACE",
))  # fmt: skip
"""All variables of unisono."""

_IP_VERSIONS: Mapping[str, int | None] = {"": None, "AF_INET": 4, "AF_INET6": 6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a communicator. Raises `ValueError` for invalid values."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    staging_bytes: int = DEFAULT_STAGING_BYTES
    stores: StorePolicy = StorePolicy.ADAPTIVE
    single_copy: SingleCopy = SingleCopy.AUTO
    reproducible: bool = False
    selection: str = ""
    """Path of a selection file."""
    algorithm: str = ""
    """Algorithms by operation, such as all_reduce=ring;broadcast=chain."""
    tuned: str = ""
    """Path of the selection file that `unisono tune` writes for this machine. The file may not
    exist."""
    job_secret: str | None = field(default=None, repr=False)
    job_secret_file: str | None = None
    ports: range | None = None
    """Ports on which to listen for other hosts. None: any port."""
    peer_timeout_s: float = DEFAULT_PEER_TIMEOUT_S
    """Seconds for which another host may be silent while a rank waits for it."""
    interface: str = ""
    """Interfaces for connections to other hosts, in NCCL's syntax. Empty: all interfaces that reach
    other hosts."""
    ip_version: int | None = None
    """IP version of the addresses of `interface`: 4 or 6. None: 4 if an interface has both."""
    rails: int | None = None
    """Maximum number of interfaces to use. None: all."""
    host_id: str = ""
    """Name of this rank's host. Ranks with different names count as ranks of different hosts, even
    on one machine."""
    wire: str = "tcp"
    """Transport between hosts: tcp or mpi."""
    streams: int = 1
    """Number of connections over each interface to each peer on another host."""
    tls: str = "off"
    """Protection of the data between hosts: off, psk (TLS with keys from the job's secret) or
    certificates."""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_ca: str = ""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ValueError(f"the timeout (UNISONO_TIMEOUT_S) must be positive: {self.timeout_s}")
        if not 1 << 16 <= self.staging_bytes <= 1 << 34:
            raise ValueError(
                f"UNISONO_STAGING_BYTES must be from 64 KiB to 16 GiB, not {self.staging_bytes}"
            )
        if not 1 <= self.peer_timeout_s <= 3600:
            raise ValueError(
                f"UNISONO_PEER_TIMEOUT_S must be from 1 to 3600, not {self.peer_timeout_s}"
            )
        if not 1 <= self.streams <= 64:
            raise ValueError(f"UNISONO_STREAMS must be from 1 to 64, not {self.streams}")
        if self.wire not in ("tcp", "mpi"):
            raise ValueError(f"UNISONO_WIRE must be tcp or mpi, not {self.wire!r}")
        if self.tls not in ("off", "psk", "certificates"):
            raise ValueError(f"UNISONO_TLS must be off, psk or certificates, not {self.tls!r}")
        if self.tls != "off" and self.wire == "mpi":
            raise ValueError(f"TLS ({self.tls}) cannot protect MPI's messages (UNISONO_WIRE=mpi)")
        if self.rails is not None and not 1 <= self.rails <= 16:
            raise ValueError(f"UNISONO_RAILS must be from 1 to 16, not {self.rails}")


def settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Returns the settings from the environment variables.

    >>> settings({"UNISONO_TIMEOUT_S": "5"}).timeout_s
    5.0
    """
    if environ is os.environ:
        _warn_once()
    stores = environ.get("UNISONO_STORES", "adaptive")
    if stores.upper() not in StorePolicy.__members__:
        raise ValueError(f"UNISONO_STORES must be cached, streaming or adaptive, not {stores!r}")
    single_copy = environ.get("UNISONO_SINGLE_COPY", SingleCopy.AUTO)
    if single_copy not in list(SingleCopy):
        raise ValueError(f"UNISONO_SINGLE_COPY must be auto, never or always, not {single_copy!r}")
    return Settings(
        timeout_s=variable_parsing.seconds(environ, "UNISONO_TIMEOUT_S", DEFAULT_TIMEOUT_S),
        staging_bytes=variable_parsing.number(
            environ, "UNISONO_STAGING_BYTES", DEFAULT_STAGING_BYTES
        ),
        stores=StorePolicy[stores.upper()],
        single_copy=SingleCopy(single_copy),
        reproducible=variable_parsing.switch(environ, "UNISONO_REPRODUCIBLE"),
        selection=environ.get("UNISONO_SELECTION", ""),
        algorithm=environ.get("UNISONO_ALGORITHM", ""),
        tuned=tuned_path(environ),
        job_secret=environ.get("UNISONO_JOB_SECRET"),
        job_secret_file=environ.get("UNISONO_JOB_SECRET_FILE"),
        ports=_ports(environ),
        peer_timeout_s=variable_parsing.seconds(
            environ, "UNISONO_PEER_TIMEOUT_S", DEFAULT_PEER_TIMEOUT_S
        ),
        wire=environ.get("UNISONO_WIRE", "tcp"),
        streams=variable_parsing.number(environ, "UNISONO_STREAMS", 1),
        tls=environ.get("UNISONO_TLS", "off"),
        tls_certificate=environ.get("UNISONO_TLS_CERTIFICATE", ""),
        tls_key=environ.get("UNISONO_TLS_KEY", ""),
        tls_ca=environ.get("UNISONO_TLS_CA", ""),
        interface=environ.get("UNISONO_INTERFACE", ""),
        ip_version=_ip_version(environ),
        rails=variable_parsing.number(environ, "UNISONO_RAILS")
        if "UNISONO_RAILS" in environ
        else None,
        host_id=environ.get("UNISONO_HOST_ID", ""),
    )


@functools.cache
def _warn_once() -> None:
    variable_parsing.warn_of_unknown(os.environ, VARIABLES)


def override(
    found: Settings, *, timeout_s: float | None = None, reproducible: bool | None = None
) -> Settings:
    """Returns the settings with the given values replaced; None keeps a setting.

    >>> override(Settings(), timeout_s=5.0).timeout_s
    5.0
    """
    return replace(
        found,
        timeout_s=found.timeout_s if timeout_s is None else timeout_s,
        reproducible=found.reproducible if reproducible is None else reproducible,
    )


def replaced_backend(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the name of the torch backend that this one replaces; empty: none.

    >>> replaced_backend({"UNISONO_REPLACE": "Gloo "})
    'gloo'
    """
    return environ.get("UNISONO_REPLACE", "").strip().lower()


def gloo_network(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the network that a program chooses for Gloo, as DDP logs it.

    >>> gloo_network({"GLOO_SOCKET_IFNAME": "eth0"})
    {'gloo_socket_ifname': 'eth0', 'gloo_device_transport': 'N/A'}
    """
    names = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
    return {name.lower(): environ.get(name, "N/A") for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecorder:
    """Settings of torch's flight recorder: the number of calls kept for each group, and the path of
    dumps. The rank is appended to the path.
    """

    calls: int = 0
    dump_prefix: str = ""


def flight_recorder(environ: Mapping[str, str] = os.environ) -> FlightRecorder:
    """Returns the flight recorder's settings, from torch's own variables.

    >>> flight_recorder({"TORCH_FR_BUFFER_SIZE": "100"}).calls
    100
    """
    cache = _cache_home(environ) or "/tmp/.cache"
    return FlightRecorder(
        calls=variable_parsing.number(environ, "TORCH_FR_BUFFER_SIZE", 0),
        dump_prefix=environ.get(
            "TORCH_FR_DUMP_TEMP_FILE", os.path.join(cache, "torch", "comm_lib_trace_rank_")
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSettings:
    """Settings of timelines: the number of events kept for each rank, and the folder of the files.
    With 0 events, nothing is recorded. An empty folder means the default folder.
    """

    events: int = DEFAULT_TIMELINE_EVENTS
    folder: str = ""

    def __post_init__(self) -> None:
        if self.events != 0 and not 64 <= self.events <= 1 << 24:
            raise ValueError(
                f"UNISONO_TIMELINE_EVENTS must be 0 or from 64 to {1 << 24}, not {self.events}"
            )


def timeline_settings(environ: Mapping[str, str] = os.environ) -> TimelineSettings:
    """Returns the settings of timelines. Raises `ValueError` for an invalid number of events.

    >>> timeline_settings({"UNISONO_TIMELINE_EVENTS": "0"}).events
    0
    """
    return TimelineSettings(
        events=variable_parsing.number(environ, "UNISONO_TIMELINE_EVENTS", DEFAULT_TIMELINE_EVENTS),
        folder=environ.get("UNISONO_TIMELINE_DIR", ""),
    )


def tuned_path(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the path of this machine's tuned selection, or "" without a home directory.

    There is one file for each CPU model and number of cores, in the user's cache (XDG base
    directory specification).

    >>> tuned_path({"XDG_CACHE_HOME": "/cache"}).startswith("/cache/unisono/selection-")
    True
    """
    home = _cache_home(environ)
    if not home:
        return ""
    facts = f"{cpu_model()}-{os.cpu_count()}-cores-{platform.machine()}"
    return f"{home}/unisono/selection-{re.sub('[^a-z0-9]+', '-', facts.lower())}.json"


def _cache_home(environ: Mapping[str, str]) -> str:
    home = environ.get("HOME")
    return environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "")


@functools.cache
def cpu_model() -> str:
    """Returns the CPU's model name, or its architecture if the model name is not known."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            named = (line.partition(":")[2].strip() for line in file if line[:10] == "model name")
            return next(named, platform.machine())
    except OSError:
        return platform.machine()


def launched_rank(environ: Mapping[str, str] = os.environ) -> World:
    """Returns the rank, the number of ranks and the rendezvous that the launcher set.

    Raises `RendezvousError` if no launcher is recognised, or if the ranks are on several hosts and
    the launcher does not tell them where to meet.

    >>> launched_rank({"UNISONO_RANK": "1", "UNISONO_SIZE": "2", "UNISONO_RENDEZVOUS": "doc"})
    LaunchedRank(rank=1, size=2, rendezvous='doc')
    """
    return launchers.world(environ)


def rank_if_launched(environ: Mapping[str, str] = os.environ) -> World | None:
    """Returns what `launched_rank` returns, or None if no launcher is recognised.

    >>> rank_if_launched({}) is None
    True
    """
    return launchers.world_if_launched(environ)


def export(found: World, environ: os._Environ[str] = os.environ) -> None:
    """Sets the variables from which a child process reads its rank, the number of ranks and the
    rendezvous.
    """
    environ["UNISONO_RANK"] = str(found.rank)
    environ["UNISONO_SIZE"] = str(found.size)
    environ["UNISONO_RENDEZVOUS"] = found.rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRank:
    """Rank of this process among the ranks of its host, and their number."""

    rank: int
    size: int


def export_to_torch(
    found: World,
    master: tuple[str, int],
    place: LocalRank,
    environ: os._Environ[str] = os.environ,
) -> None:
    """Sets the variables that torch.distributed reads (RANK, WORLD_SIZE and others). Rank 0's store
    listens at `master`, a host and a port.
    """
    for name in [name for name in environ if name.startswith("TORCHELASTIC_")]:
        del environ[name]  # these describe the torchrun that started this program, and its store
    environ["RANK"], environ["LOCAL_RANK"] = str(found.rank), str(place.rank)
    environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"] = str(found.size), str(place.size)
    environ["MASTER_ADDR"], environ["MASTER_PORT"] = master[0], str(master[1])


def export_threads(ranks: int, cores: int, environ: os._Environ[str] = os.environ) -> int | None:
    """Sets OMP_NUM_THREADS to the part of the host's cores of one of `ranks`. Returns the part, or
    None if the program has set the variable or has one rank.

    Otherwise each rank computes with a thread for each core. These threads wait for each other in
    loops, so the ranks take the cores from each other. torchrun sets the variable to 1.
    """
    if ranks == 1 or "OMP_NUM_THREADS" in environ:
        return None
    part = max(1, cores // ranks)
    environ["OMP_NUM_THREADS"] = str(part)
    return part


def _ip_version(environ: Mapping[str, str]) -> int | None:
    """Returns the IP version of UNISONO_SOCKET_FAMILY, which takes the values of
    NCCL_SOCKET_FAMILY.
    """
    given = environ.get("UNISONO_SOCKET_FAMILY", "")
    if given not in _IP_VERSIONS:
        raise ValueError(f"UNISONO_SOCKET_FAMILY must be AF_INET or AF_INET6, not {given!r}")
    return _IP_VERSIONS[given]


def _ports(environ: Mapping[str, str]) -> range | None:
    """Returns the ports of UNISONO_PORTS, such as 20000-20100, both ends included."""
    if "UNISONO_PORTS" not in environ:
        return None
    given = environ["UNISONO_PORTS"]
    found = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", given)
    if found is not None:
        first, last = int(found[1]), int(found[2] or found[1])
        if 1 <= first <= last <= 65535:
            return range(first, last + 1)
    raise ValueError(f"UNISONO_PORTS must be such as 20000-20100, not {given!r}")
