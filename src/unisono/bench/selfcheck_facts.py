"""Facts about the environment that `unisono check` lists."""

from __future__ import annotations

import ctypes
import importlib
import os
from dataclasses import dataclass

import numpy as np

from unisono.bench.core_latency import describe_latency, probe_core_latency_s
from unisono.bench.machine_facts import describe_machine
from unisono.communicator import Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One fact. `good` is None for a fact that is neither good nor bad."""

    name: str
    value: str
    good: bool | None = None


def gather_facts(reads_neighbour: bool | None) -> tuple[Fact, ...]:
    """Returns facts of this machine. `reads_neighbour` is True if `read_neighbour` returned True on
    all ranks, and None if this is not known."""
    machine = describe_machine()
    probe_s = probe_core_latency_s()
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    facts = [
        Fact(name="cpu", value=f"{machine['cpu']} ({machine['architecture']})"),
        Fact(name="cores", value=f"{machine['cores']} usable"),
        Fact(name="kernel", value=machine["kernel"]),
        Fact(name="packages", value=packages),
        Fact(name="vector kernels", value=_isa()),
        Fact(
            name="core to core",
            value=f"{describe_latency(() if probe_s is None else (probe_s,))} (ns one way)",
        ),
        _memfd_fact(),
    ]
    if reads_neighbour is not None:
        value = "allowed" if reads_neighbour else "forbidden here; copies use staging buffers"
        facts.append(Fact(name="process_vm_readv", value=value, good=reads_neighbour))
    return tuple(facts)


class _IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_neighbour(comm: Communicator) -> bool:
    """Returns True if this rank can read the next rank's memory with process_vm_readv. All ranks
    must call this function."""
    secret = np.full(8, 1 + comm.rank, dtype=np.int64)
    addresses = np.zeros((comm.size, 2), dtype=np.int64)
    own = np.array([os.getpid(), secret.ctypes.data], dtype=np.int64)
    comm.all_gather(own, addresses.reshape(-1))
    peer = (comm.rank + 1) % comm.size
    pid, address = (int(value) for value in addresses[peer])
    read = np.zeros_like(secret)
    target = _IoVector(read.ctypes.data, read.nbytes)
    source = _IoVector(address, read.nbytes)
    libc = ctypes.CDLL(None, use_errno=True)
    count = libc.process_vm_readv(pid, ctypes.byref(target), 1, ctypes.byref(source), 1, 0)
    comm.barrier()  # keeps this rank's array alive until the other rank has read it
    return bool(count == read.nbytes and (read == 1 + peer).all())


def _memfd_fact() -> Fact:
    try:
        os.close(os.memfd_create("unisono-check", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        return Fact(name="memfd_create", value=str(error), good=False)
    return Fact(name="memfd_create", value="works", good=True)


def _isa() -> str:
    try:
        native = importlib.import_module("unisono.native")
    except ImportError:
        return "no native core"
    return str(native.isa())
