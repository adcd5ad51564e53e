"""The address of JAX's coordinator."""

from __future__ import annotations

import numpy as np

from unisono import config
from unisono.communicator import Communicator
from unisono.transport import available_interfaces, choose_interfaces, format_address, listen

_ADDRESS_BYTES = 256


def common_coordinator(comm: Communicator) -> str:
    """Returns an address that rank 0 chooses, on all ranks. Collective."""
    address = np.zeros(_ADDRESS_BYTES, np.uint8)
    if comm.rank == 0:
        chosen = _coordinator(several_hosts=len(comm.hosts) > 1).encode()
        address[: len(chosen)] = np.frombuffer(chosen, np.uint8)
    comm.broadcast(address)
    return address.tobytes().rstrip(b"\0").decode()


def _coordinator(*, several_hosts: bool) -> str:
    """Returns an address of this host with a port that is free now."""
    settings, host = config.settings(), "127.0.0.1"
    if several_hosts:
        found = available_interfaces(settings.ip_version)
        host = choose_interfaces(settings.interface, found, rails=1)[0].address
    (listener,) = listen([host], settings.ports)
    with listener:
        return format_address(listener.getsockname())
