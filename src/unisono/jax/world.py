"""The group of all processes of a JAX program."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

from unisono import config
from unisono.communicator import Communicator, init, join_by_store
from unisono.errors import RendezvousError
from unisono.jax.coordinator import common_coordinator

_PREFIX = "unisono/"
_ANSWER_MS = 60_000
"""Milliseconds for the answer of JAX's coordinator about a key that exists."""


class ClientStore:
    """The key-value store of `jax.distributed` with the methods of `bootstrap.Store`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: str | bytes, /) -> None:
        """Sets a key to text or bytes."""
        content = value.encode() if isinstance(value, str) else value
        self._client.key_value_set_bytes(_PREFIX + key, content)

    def get(self, key: str, /) -> bytes:
        """Returns the value of an existing key."""
        found: bytes = self._client.blocking_key_value_get_bytes(_PREFIX + key, _ANSWER_MS)
        return found

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Returns when all keys exist. Raises `RuntimeError` after the timeout."""
        for key in keys:
            milliseconds = max(1, int(1000 * timeout.total_seconds()))
            self._client.blocking_key_value_get_bytes(_PREFIX + key, milliseconds)


class World:
    """Joins the group of all processes when JAX makes its devices."""

    def __init__(self) -> None:
        self._comm: Communicator | None = None
        self._joined_first: Communicator | None = None

    def initialize(self, **options: Any) -> None:
        """Calls `jax.distributed.initialize` for the ranks of `unisono.run`, torchrun, mpiexec or
        srun.

        Rank 0 chooses the address of JAX's coordinator. `options`: further arguments of
        `jax.distributed.initialize`. Raises the errors of `unisono.init`.
        """
        import jax

        comm = init()
        jax.distributed.initialize(
            coordinator_address=common_coordinator(comm),
            num_processes=comm.size,
            process_id=comm.rank,
            **options,
        )
        self._joined_first = comm  # on all ranks: those of JAX need not join again

    def join(self) -> Communicator:
        """Returns the group of the processes of `jax.distributed`. Collective.

        Raises `RendezvousError` if jax is not distributed, and the errors of `unisono.init`.
        """
        try:
            return self._joined()
        except Exception as error:
            # jax ignores this error, and waits for all processes before its first collective
            reason = f"{type(error).__name__}: {error}"
            print(f"unisono.jax: this process has no collectives: {reason}", file=sys.stderr)
            raise

    def _joined(self) -> Communicator:
        from jax._src import distributed

        state = distributed.global_state
        if state.client is None:
            raise RendezvousError("call jax.distributed.initialize before the first use of devices")
        if self._comm is not None:  # jax has shut its processes down, and begins again
            self._comm.close()
        if self._joined_first is not None:
            self._comm, self._joined_first = self._joined_first, None
            return self._comm
        store = ClientStore(state.client)
        self._comm = join_by_store(store, state.process_id, state.num_processes, config.settings())
        return self._comm

    def refusal(self) -> str | None:
        """Returns why JAX's collectives would be wrong, or None."""
        import jax

        devices = jax.local_device_count("cpu")
        if devices == 1:
            return None
        return (
            f"expected one CPU device in each process, got {devices}: with several, JAX's MPI "
            "collectives compute wrong sums; set jax_num_cpu_devices = 1 (and remove "
            "--xla_force_host_platform_device_count), and start more processes"
        )
