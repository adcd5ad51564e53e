"""A client of several replicas of vLLM, for the weight transfer engines of vLLM."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from unisono.errors import PeerLostError

_log = logging.getLogger("unisono")


class ReplicaClients:
    """Calls several replicas of vLLM as one, for the argument `client` of a trainer's end.

    Each replica has its own client, such as vLLM's `HTTPVLLMWeightSyncClient(url)`. A replica whose
    call fails is logged and left out of all later calls. `add` lets a replica join.
    """

    def __init__(self, clients: Sequence[Any]) -> None:
        self._clients = list(clients)
        self._updating: list[Any] = []
        self._init_info: dict[str, Any] | None = None

    @property
    def clients(self) -> tuple[Any, ...]:
        """The clients of the replicas that are not left out."""
        return tuple(self._clients)

    def add(self, client: Any) -> None:
        """Lets a replica take part from the next update on. Raises the client's error."""
        if self._init_info is not None:
            client.init_weight_transfer_engine(self._init_info)
        self._clients.append(client)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connects all replicas to the trainer."""
        self._init_info = init_info
        self._on_each(self._clients, lambda each: each.init_weight_transfer_engine(init_info))

    def start_weight_update(self) -> None:
        """Begins an update on all replicas."""
        self._updating = list(self._clients)
        self._on_each(self._updating, lambda each: each.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        """Makes all replicas of the update receive weights; returns when they have them."""
        self._on_each(self._updating, lambda each: each.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends an update on all replicas that took part in it."""
        self._on_each(self._updating, lambda each: each.finish_weight_update(weight_version))

    def _on_each(self, clients: list[Any], call: Callable[[Any], None]) -> None:
        """Calls all clients at once; leaves out those that fail, or raises if all fail."""
        if not clients:
            raise PeerLostError("no replica of vLLM is left: pass one to add")
        with ThreadPoolExecutor(len(clients)) as pool:
            outcomes = [(each, pool.submit(call, each)) for each in list(clients)]
        for client, outcome in outcomes:
            error = outcome.exception()
            if error is not None:
                _log.warning("a replica of vLLM is left out: %s: %s", type(error).__name__, error)
                self._leave_out(client)
        if not clients or not self._clients:
            raise PeerLostError("all replicas of vLLM have failed; the log has the reasons")

    def _leave_out(self, client: Any) -> None:
        for clients in (self._clients, self._updating):
            if client in clients:
                clients.remove(client)
        # if its workers live, the trainer must not wait for them
        with contextlib.suppress(Exception):
            client.shutdown_weight_transfer_engine()
