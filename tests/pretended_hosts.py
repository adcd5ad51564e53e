"""Ranks of several simulated hosts, as threads of this process that are connected over loopback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bootstrap_stores import free_port
from unisono import Communicator, config
from unisono.communicator.initialization import join

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
    """Runs `body(comm)` on one rank for each dictionary of environment variables. Returns each
    rank's result or exception.
    """
    rendezvous = f"tcp://{address}:{free_port()}"

    def rank_body(rank: int) -> Any:
        environ = {"UNISONO_HOST_ID": str(rank // per_host), **environs[rank]}
        try:
            with _join(rank, len(environs), rendezvous, timeout_s, environ) as comm:
                return body(comm)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(environs)) as pool:
        return list(pool.map(rank_body, range(len(environs))))


def _join(
    rank: int, size: int, rendezvous: str, timeout_s: float, environ: dict[str, str]
) -> Communicator:
    usual = {
        "UNISONO_INTERFACE": "=lo",
        "UNISONO_SOCKET_FAMILY": "AF_INET6" if IPV6 in rendezvous else "AF_INET",
        "UNISONO_TIMEOUT_S": str(timeout_s),
    }
    world = config.LaunchedRank(rank=rank, size=size, rendezvous=rendezvous)
    return join(world, config.settings(usual | environ))


class World:
    """Communicators of one thread, with one rank for each entry of `hosts`. Close the world after
    use.
    """

    def __init__(self, hosts: Sequence[int], *, timeout_s: float) -> None:
        rendezvous = f"tcp://127.0.0.1:{free_port()}"

        def joined(rank: int) -> Communicator:
            environ = {"UNISONO_HOST_ID": str(hosts[rank])}
            return _join(rank, len(hosts), rendezvous, timeout_s, environ)

        with ThreadPoolExecutor(len(hosts)) as pool:
            self.comms = list(pool.map(joined, range(len(hosts))))

    def abort(self) -> None:
        """Aborts pending calls, then closes the communicators."""
        self.comms[0].abort("a test has failed")
        self.close()

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.comms)) as pool:
            list(pool.map(Communicator.close, self.comms))


def run(world: World, body: Body) -> list[Any]:
    """Runs `body(comm)` on all ranks. Returns each rank's result or exception."""

    def rank(comm: Communicator) -> Any:
        try:
            return body(comm)
        except Exception as error:
            comm.abort(f"{type(error).__name__}: {error}")
            return error

    with ThreadPoolExecutor(len(world.comms)) as pool:
        return list(pool.map(rank, world.comms))


def check_all(world: World, body: Body) -> None:
    """Runs `body(comm)` on all ranks. Raises the first exception."""
    for outcome in run(world, body):
        if isinstance(outcome, Exception):
            raise outcome
