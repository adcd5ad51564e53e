"""Ranks of several pretended hosts, as threads of this process that connect over loopback."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from boards import free_port
from unisono import Communicator, config
from unisono.communicator.joining import join

Body = Callable[[Communicator], Any]
IPV6 = "[::1]"


def spanning(
    body: Body,
    environs: list[dict[str, str]],
    *,
    per_host: int = 1,
    timeout_s: float = 40.0,
    address: str = "127.0.0.1",
) -> list[Any]:
    """`body(comm)` on a rank for each of the environments: what it returned or raised."""
    rendezvous = f"tcp://{address}:{free_port()}"
    family = "AF_INET6" if address == IPV6 else "AF_INET"

    def rank_body(rank: int) -> Any:
        environ = {
            "UNISONO_HOST_ID": str(rank // per_host),
            "UNISONO_INTERFACE": "=lo",
            "UNISONO_SOCKET_FAMILY": family,
            "UNISONO_TIMEOUT_S": str(timeout_s),
            **environs[rank],
        }
        world = config.World(rank=rank, size=len(environs), rendezvous=rendezvous)
        try:
            with join(world, config.settings(environ)) as comm:
                return body(comm)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(environs)) as pool:
        return list(pool.map(rank_body, range(len(environs))))
