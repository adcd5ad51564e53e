"""Initialises `jax.distributed` by the variables of a launcher."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono import config
from unisono.communicator import init
from unisono.transport import available_interfaces, choose_interfaces, format_address, listen

_ADDRESS_BYTES = 256


def initialize(**options: Any) -> None:
    """Calls `jax.distributed.initialize` for the ranks of `unisono.run`, torchrun, mpiexec or srun.

    Rank 0 chooses the address of JAX's coordinator. `options`: further arguments of
    `jax.distributed.initialize`. Raises the errors of `unisono.init`.
    """
    import jax

    with init() as comm:
        address = np.zeros(_ADDRESS_BYTES, np.uint8)
        if comm.rank == 0:
            chosen = _coordinator(several_hosts=len(comm.hosts) > 1).encode()
            address[: len(chosen)] = np.frombuffer(chosen, np.uint8)
        comm.broadcast(address)
        rank, size = comm.rank, comm.size
    jax.distributed.initialize(
        coordinator_address=address.tobytes().rstrip(b"\0").decode(),
        num_processes=size,
        process_id=rank,
        **options,
    )


def _coordinator(*, several_hosts: bool) -> str:
    """Returns an address of this host with a port that is free now."""
    settings, host = config.settings(), "127.0.0.1"
    if several_hosts:
        found = available_interfaces(settings.ip_version)
        host = choose_interfaces(settings.interface, found, rails=1)[0].address
    (listener,) = listen([host], settings.ports)
    with listener:
        return format_address(listener.getsockname())
