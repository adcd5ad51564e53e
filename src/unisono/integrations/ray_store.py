"""Ray's key-value store, through which the ranks of a group find each other."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import ray
from ray.experimental import internal_kv

_POLL_S = 0.01


class RayStore:
    """The methods of a bootstrap's store over Ray's key-value store.

    Keys begin with `prefix`, which must be unique in the cluster.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._written: set[str] = set()

    def set(self, key: str, value: Any) -> None:
        """Sets a key to text or bytes."""
        self._written.add(key)
        internal_kv._internal_kv_put(self._prefix + key, value, overwrite=True)

    def get(self, key: str) -> bytes:
        """Returns the value of an existing key."""
        value: bytes = internal_kv._internal_kv_get(self._prefix + key)
        return value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Returns when all keys exist. Raises `RuntimeError` if a key does not exist within the
        timeout.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        for key in keys:
            while not internal_kv._internal_kv_exists(self._prefix + key):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"Ray's store has no key {key} after {timeout}")
                time.sleep(_POLL_S)

    def clear(self) -> None:
        """Deletes the keys that this rank has set."""
        for key in self._written:
            internal_kv._internal_kv_del(self._prefix + key)
        self._written.clear()


def store_of_group(name: str) -> RayStore:
    """Returns the store of a collective group. As in Ray, a group's name is unique in a namespace
    of the cluster.
    """
    return RayStore(f"unisono/{ray.get_runtime_context().namespace}/{name}/")
