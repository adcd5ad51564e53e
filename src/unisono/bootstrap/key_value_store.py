"""A store of keys and values, such as torch's, as the board by which ranks find each other.

Rank 0 opens a round of a name that it draws, every rank posts its text there, rank 0 posts all of
them as one verdict. Each post begins with a token that its rank drew, and a rank believes only a
verdict that has its token. So what an earlier attempt left in the same store (a restart by
torchrun, a second `init`) is never taken for this one, and nothing needs to be deleted.
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

_POST = struct.Struct("<16sII")  # token, rank, size; then the text
_LOOK_S = 0.5
"""How often a rank that waits looks whether rank 0 has opened a new round."""
_VERDICT_S = 1.0


class Store(Protocol):
    """What is needed of a `torch.distributed.Store`."""

    def set(self, key: str, value: Any, /) -> None:
        """Sets text or bytes."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that is there."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Returns when all keys are there. Raises `RuntimeError` if they are not in time."""


class KeyValueBootstrap:
    """A `Board` over the store that `open_store` returns within the seconds it is given.

    `name` keeps groups apart that use one store. `secret` is the job's, if the user gave one: the
    store itself asks for none.
    """

    def __init__(
        self, open_store: Callable[[float], Store], name: str, secret: bytes | None = None
    ) -> None:
        self._open = open_store
        self._name = name
        self._secret = secret

    @property
    def secret(self) -> bytes | None:
        """The job's secret, which is not the store's."""
        return self._secret

    def exchange(self, rank: int, size: int, mine: bytes, timeout_s: float) -> list[bytes]:
        """The texts of all ranks, in their order. Raises `RendezvousError`."""
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: ranks are counted from 0 to size-1")
        if len(mine) > MOST_TEXT_BYTES:
            raise ValueError(f"{len(mine)} bytes: at most {MOST_TEXT_BYTES} for a rank")
        deadline = time.monotonic() + timeout_s
        post = _POST.pack(secrets.token_bytes(16), rank, size) + mine
        try:
            store = self._open(timeout_s)
            visit = _Visit(store, self._name, rank, size, deadline, timeout_s)
            posts = visit.lead(post) if rank == 0 else visit.follow(post)
        except RuntimeError as error:  # of torch: the store is gone, or was never there
            raise RendezvousError(
                f"rank {rank} of {size}: the store by which the ranks meet failed: {error}"
            ) from error
        return [one[_POST.size :] for one in posts]


class _Visit:
    """One exchange of one rank."""

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
        """Rank 0: opens a round, and tells all when everybody has posted."""
        opened = secrets.token_hex(8)
        self._store.set(f"{self._name}/round", opened)
        missing = self._missing(opened, "")
        came = [rank for rank in range(1, self._size) if rank not in missing]
        posts = [post, *(self._store.get(self._key(opened, rank)) for rank in came)]
        problem = ""
        if missing:
            problem = (
                f"after {self._timeout_s:g} s (timeout) these ranks of {self._size} had not come: "
                f"{missing}"
            )
        for one in posts:
            _, rank, size = _POST.unpack_from(one)
            if size != self._size:
                problem = f"rank {rank} expects {size} ranks, rank 0 expects {self._size}"
        self._store.set(self._key(opened, "all"), pack_texts([problem.encode(), *posts]))
        if problem:
            raise RendezvousError(problem)
        # The store may live in this very process: it must not end while others need it.
        if lost := self._missing(opened, "/read"):
            raise RendezvousError(f"ranks {lost} were lost while the ranks were meeting")
        return posts

    def follow(self, post: bytes) -> list[bytes]:
        """The others: post in every round that rank 0 opens, until one has a verdict for them."""
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
            if post not in posts:  # of an earlier attempt; the next round may be this one
                time.sleep(min(_LOOK_S, left_s) / 10)
                continue
            if problem:
                raise RendezvousError(problem.decode())
            self._store.set(f"{self._key(opened, self._rank)}/read", b"1")
            return posts

    def _why_none_came(self, posted_in: str) -> str:
        who = f"rank {self._rank} of {self._size}"
        if not posted_in:
            return f"{who}: rank 0 did not come to the store within {self._timeout_s:g} s (timeout)"
        return (
            f"{who}: not all ranks came within {self._timeout_s:g} s (timeout), or rank 0 expects "
            f"another number of ranks, or another process came as rank {self._rank}"
        )

    def _missing(self, opened: str, suffix: str) -> list[int]:
        """The ranks whose keys are not there at the deadline."""
        keys = {rank: self._key(opened, rank) + suffix for rank in range(1, self._size)}
        if self._wait(list(keys.values()), self._deadline - time.monotonic()):
            return []
        return [rank for rank, key in keys.items() if not self._wait([key], 1e-3)]

    def _key(self, opened: str, what: int | str) -> str:
        return f"{self._name}/{opened}/{what}"

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Whether the keys are there, at latest after so many seconds."""
        if not keys:
            return True
        started = time.monotonic()
        seconds = max(seconds, 1e-3)
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:
            if time.monotonic() - started < seconds / 2 and seconds > _LOOK_S / 10:
                raise  # not the time was over, but the store is gone
            return False
        return True
