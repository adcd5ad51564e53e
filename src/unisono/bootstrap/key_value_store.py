"""Bootstrap through a key-value store, such as torch's.

Rank 0 opens a round with a random name. Every rank stores its text under that round, and rank 0
stores all texts as one result. Each text begins with a random token of its rank, and a rank accepts
only a result that contains its token. So a rank never accepts values of an earlier attempt in the
same store (a restart by torchrun, a second `init`), and no key needs to be deleted.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from unisono.bootstrap.tcp_store_frames import MOST_TEXT_BYTES, pack_texts, unpack_texts
from unisono.errors import RendezvousError

_POST = struct.Struct("<16sII")  # token, rank, size; then the rank's text
_LOOK_S = 0.5
"""Interval at which a waiting rank checks whether rank 0 has opened a new round."""
_VERDICT_S = 1.0


class Store(Protocol):
    """The methods of `torch.distributed.Store` that this module uses."""

    def set(self, key: str, value: Any, /) -> None:
        """Sets a key to text or bytes."""

    def get(self, key: str, /) -> bytes:
        """Returns the value of an existing key."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Returns when all keys exist. Raises `RuntimeError` if they do not within the timeout."""


class KeyValueBootstrap:
    """A `BootstrapStore` over the store that `open_store` opens; its argument is a timeout in
    seconds.

    `name` separates groups that use the same store. `secret` is the job's secret, if the user gave
    one; the store itself does not check it.
    """

    def __init__(
        self, open_store: Callable[[float], Store], name: str, secret: bytes | None = None
    ) -> None:
        self._open = open_store
        self._name = name
        self._secret = secret

    @property
    def secret(self) -> bytes | None:
        """The job's secret. The store does not check it."""
        return self._secret

    def exchange(self, rank: int, size: int, mine: bytes, timeout_s: float) -> list[bytes]:
        """Returns the texts of all ranks, by rank. Raises `RendezvousError`."""
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: expected a rank from 0 to size-1")
        if len(mine) > MOST_TEXT_BYTES:
            raise ValueError(f"a text of {len(mine)} bytes: at most {MOST_TEXT_BYTES} per rank")
        deadline = time.monotonic() + timeout_s
        post = _POST.pack(secrets.token_bytes(16), rank, size) + mine
        try:
            store = self._open(timeout_s)
            visit = _Visit(store, self._name, rank, size, deadline, timeout_s)
            posts = visit.lead(post) if rank == 0 else visit.follow(post)
        except RuntimeError as error:  # from torch: the store is gone or was never reachable
            raise RendezvousError(
                f"rank {rank} of {size}: the store through which ranks find each other failed: "
                f"{error}"
            ) from error
        return [one[_POST.size :] for one in posts]


class _Visit:
    """One exchange by one rank."""

    def __init__(
        self, store: Store, name: str, rank: int, size: int, deadline: float, timeout_s: float
    ) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size
        self._deadline = deadline
        self._timeout_s = timeout_s

    def lead(self, post: bytes) -> list[bytes]:
        """Runs rank 0's part: opens a round, waits for all texts, stores the result."""
        opened = secrets.token_hex(8)
        self._store.set(f"{self._name}/round", opened)
        missing = self._missing(opened, "")
        came = [rank for rank in range(1, self._size) if rank not in missing]
        posts = [post, *(self._store.get(self._key(opened, rank)) for rank in came)]
        problem = ""
        if missing:
            problem = (
                f"after {self._timeout_s:g} s (timeout) these ranks of {self._size} are missing: "
                f"{missing}"
            )
        for one in posts:
            _, rank, size = _POST.unpack_from(one)
            if size != self._size:
                problem = f"rank {rank} expects {size} ranks, rank 0 expects {self._size}"
        self._store.set(self._key(opened, "all"), pack_texts([problem.encode(), *posts]))
        if problem:
            raise RendezvousError(problem)
        # The store may live in this process, which must not exit while others need the store.
        if lost := self._missing(opened, "/read"):
            raise RendezvousError(f"ranks {lost} were lost during the bootstrap")
        return posts

    def follow(self, post: bytes) -> list[bytes]:
        """Runs another rank's part: stores its text in every round that rank 0 opens, until a
        result contains that text."""
        posted_in = ""
        while True:
            left_s = self._deadline + _VERDICT_S - time.monotonic()
            if left_s <= 0:
                raise RendezvousError(self._why_none_came(posted_in))
            if not self._wait([f"{self._name}/round"], left_s):
                continue
            opened = self._store.get(f"{self._name}/round").decode()
            if opened != posted_in:
                self._store.set(self._key(opened, self._rank), post)
                posted_in = opened
            if not self._wait([self._key(opened, "all")], min(_LOOK_S, left_s)):
                continue
            problem, *posts = unpack_texts(self._store.get(self._key(opened, "all")))
            # the result of an earlier attempt; a newer round may include this rank
            if post not in posts:
                time.sleep(min(_LOOK_S, left_s) / 10)
                continue
            if problem:
                raise RendezvousError(problem.decode())
            self._store.set(f"{self._key(opened, self._rank)}/read", b"1")
            return posts

    def _why_none_came(self, posted_in: str) -> str:
        who = f"rank {self._rank} of {self._size}"
        if not posted_in:
            return f"{who}: rank 0 did not reach the store within {self._timeout_s:g} s (timeout)"
        return (
            f"{who}: not all ranks came within {self._timeout_s:g} s (timeout), or rank 0 expects "
            f"another number of ranks, or another process claims to be rank {self._rank}"
        )

    def _missing(self, opened: str, suffix: str) -> list[int]:
        """Returns the ranks whose keys do not exist at the deadline."""
        keys = {rank: self._key(opened, rank) + suffix for rank in range(1, self._size)}
        if self._wait(list(keys.values()), self._deadline - time.monotonic()):
            return []
        return [rank for rank, key in keys.items() if not self._wait([key], 1e-3)]

    def _key(self, opened: str, what: int | str) -> str:
        return f"{self._name}/{opened}/{what}"

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Returns whether the keys exist, after waiting at most `seconds`."""
        if not keys:
            return True
        started = time.monotonic()
        seconds = max(seconds, 1e-3)
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:
            if time.monotonic() - started < seconds / 2 and seconds > _LOOK_S / 10:
                raise  # an early error is a failed store, not a timeout
            return False
        return True
