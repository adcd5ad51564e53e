"""Ranks on the workers of an executor.

The program listens. The executor calls `host_rank` once for each rank, on any of its workers. Each
call connects to the program, learns rank 0's address, and starts the process of its rank. The
processes then find each other as under any launcher, and their results return through the
connections. A closed connection ends a rank.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from unisono import config
from unisono.bootstrap import LinkListener, listen_for_links
from unisono.errors import PeerLostError, RendezvousError
from unisono.launch.executor import Executor, Future
from unisono.launch.hosted_rank import host_rank
from unisono.launch.pickling import pack
from unisono.launch.rank_results import collect
from unisono.launch.worker_messages import Arrival, Assignment, version
from unisono.transport import format_address

_POLL_S = 0.1
"""Interval at which the program looks for calls that have failed before they connected."""

_Arrivals = Mapping[int, tuple[Arrival, Connection]]


def run_on(
    executor: Executor, fn: Callable[..., Any], ranks: int, args: Sequence[Any]
) -> list[Any]:
    """Calls `fn(*args)` in `ranks` processes on the executor's workers, as `unisono.run`
    describes.
    """
    call = pack((fn, tuple(args)), by_value=True)
    key = secrets.token_bytes(32)
    with contextlib.ExitStack() as open_things, _listener(key) as (listener, arrivals):
        futures = [
            executor.submit(host_rank, listener.addresses, key, rank) for rank in range(ranks)
        ]
        open_things.callback(_cancel, futures)
        started: dict[int, tuple[Arrival, Connection]] = {}
        open_things.callback(_close, started)
        _await_all(arrivals, futures, started)
        for rank, assignment in enumerate(_assignments(started, call)):
            with contextlib.suppress(ConnectionError):  # `collect` finds that this worker is lost
                started[rank][1].send(assignment)
        return collect(
            [started[rank][1] for rank in range(ranks)], lambda rank: _lost(rank, futures[rank])
        )


@contextlib.contextmanager
def _listener(
    key: bytes,
) -> Iterator[tuple[LinkListener, queue.SimpleQueue[tuple[Arrival, Connection]]]]:
    """Listens for workers on the chosen interfaces of this host."""
    arrivals: queue.SimpleQueue[tuple[Arrival, Connection]] = queue.SimpleQueue()

    def arrived(connection: Connection) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            arrivals.put((connection.recv(), connection))

    listener = listen_for_links(config.settings(), key, arrived)
    try:
        yield listener, arrivals
    finally:
        listener.close()


def _await_all(
    arrivals: queue.SimpleQueue[tuple[Arrival, Connection]],
    futures: Sequence[Future],
    started: dict[int, tuple[Arrival, Connection]],
) -> None:
    """Waits until the workers of all ranks have connected, and adds them to `started`."""
    timeout_s = config.settings().timeout_s
    deadline = time.monotonic() + timeout_s
    while len(started) < len(futures):
        with contextlib.suppress(queue.Empty):
            arrival, connection = arrivals.get(timeout=_POLL_S)
            started[arrival.rank] = arrival, connection
            if arrival.version != version():
                raise RendezvousError(
                    f"rank {arrival.rank}: its worker has unisono {arrival.version}, this program "
                    f"has {version()}; install one version"
                )
            continue
        missing = [rank for rank in range(len(futures)) if rank not in started]
        for rank in missing:
            if futures[rank].done():
                _raise_refusal(rank, futures[rank])
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"the executor: timeout after {timeout_s:g} s: it has started {len(started)} of "
                f"{len(futures)} ranks, without {missing}: it must run all ranks at the same time, "
                f"so give it {len(futures)} workers"
            )


def _raise_refusal(rank: int, future: Future) -> None:
    error = _error(future)
    why = "the executor's call ended before the rank started"
    if error is not None:
        why = f"the executor could not start it: {type(error).__name__}: {error}"
    raise RendezvousError(f"rank {rank}: {why}") from error


def _error(future: Future) -> Exception | None:
    """Returns the error of a call that has ended."""
    try:
        future.result()
    except Exception as error:
        return error
    return None


def _assignments(started: _Arrivals, call: bytes) -> Iterator[Assignment]:
    """Yields what each rank needs to begin, in rank order."""
    first, size = started[0][0], len(started)
    where = format_address((first.address, first.ports[0]))
    rendezvous = f"{config.TCP}{where}/run-{secrets.token_hex(16)}"
    secret, variables = secrets.token_hex(32), config.own_variables()
    hosts: dict[str, list[int]] = {}
    for rank in range(size):
        hosts.setdefault(started[rank][0].host, []).append(rank)
    for rank in range(size):
        beside = hosts[started[rank][0].host]
        yield Assignment(
            world=config.LaunchedRank(rank=rank, size=size, rendezvous=rendezvous),
            place=config.LocalRank(rank=beside.index(rank), size=len(beside)),
            master=(first.address, first.ports[1]),
            secret=secret,
            variables=variables,
            call=call,
        )


def _lost(rank: int, future: Future) -> PeerLostError:
    """Returns the error of a rank whose worker ended."""
    until = time.monotonic() + 1.0
    while not future.done() and time.monotonic() < until:
        time.sleep(_POLL_S / 10)
    error = _error(future) if future.done() else None
    why = "its connection closed" if error is None else f"{type(error).__name__}: {error}"
    return PeerLostError(f"rank {rank}: its worker was lost ({why})")


def _close(started: _Arrivals) -> None:
    for _, connection in started.values():
        connection.close()


def _cancel(futures: Sequence[Future]) -> None:
    for each in futures:
        with contextlib.suppress(Exception):  # an executor that has failed
            each.cancel()
