"""Bootstrap through a key-value store, such as torch's.

Rank 0 starts a round, which is one attempt to exchange texts, and gives it a random name. Every
rank stores its text under that round, and rank 0 stores all texts as one result. Each text begins
with a random token of its rank, and a rank accepts only a result that contains its token. So a rank
never accepts values of an earlier attempt in the same store (a restart by torchrun, a second
`init`), and no key needs to be deleted.
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

# header of an entry: random token, rank, size; the rank's text follows
_ENTRY = struct.Struct("<16sII")
_POLL_S = 0.5
"""Interval at which a waiting rank checks whether rank 0 has opened a new round."""
_VERDICT_S = 1.0


class Store(Protocol):
    """Methods of `torch.distributed.Store` that this module uses."""

    def set(self, key: str, value: Any, /) -> None:
        """Sets a key to text or bytes."""

    def get(self, key: str, /) -> bytes:
        """Returns the value of an existing key."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Returns when all keys exist. Raises `RuntimeError` if a key does not exist within the
        timeout.
        """


class KeyValueBootstrap:
    """A `BootstrapStore` over the store that `open_store(timeout_s)` opens.

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
        entry = _ENTRY.pack(secrets.token_bytes(16), rank, size) + mine
        try:
            store = self._open(timeout_s)
            one_exchange = _Exchange(store, self._name, rank, size, deadline, timeout_s)
            entries = one_exchange.lead(entry) if rank == 0 else one_exchange.follow(entry)
        except RuntimeError as error:  # raised by torch if the store is unreachable
            raise RendezvousError(
                f"rank {rank} of {size}: the store through which ranks find each other failed: "
                f"{error}"
            ) from error
        return [one[_ENTRY.size :] for one in entries]


class _Exchange:
    """One exchange of texts among all ranks, as run by one rank."""

    def __init__(
        self, store: Store, name: str, rank: int, size: int, deadline: float, timeout_s: float
    ) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size
        self._deadline = deadline
        self._timeout_s = timeout_s

    def lead(self, entry: bytes) -> list[bytes]:
        """Runs the exchange on rank 0: starts a round, waits for all texts, stores the result."""
        round_id = secrets.token_hex(8)
        self._store.set(f"{self._name}/round", round_id)
        missing = self._missing(round_id, "")
        present = [rank for rank in range(1, self._size) if rank not in missing]
        entries = [entry, *(self._store.get(self._key(round_id, rank)) for rank in present)]
        problem = ""
        if missing:
            problem = (
                f"the bootstrap: timeout after {self._timeout_s:g} s: these ranks of {self._size} "
                f"are missing: {missing}"
            )
        for one in entries:
            _, rank, size = _ENTRY.unpack_from(one)
            if size != self._size:
                problem = f"rank {rank} expects {size} ranks, rank 0 expects {self._size}"
        self._store.set(self._key(round_id, "all"), pack_texts([problem.encode(), *entries]))
        if problem:
            raise RendezvousError(problem)
        # The store may live in this process, which must not exit while others need the store.
        if lost := self._missing(round_id, "/read"):
            raise RendezvousError(f"ranks {lost} were lost during the bootstrap")
        return entries

    def follow(self, entry: bytes) -> list[bytes]:
        """The exchange on a rank other than 0: stores this rank's text in every round that rank 0
        starts, until a result contains the text.
        """
        written_in = ""
        while True:
            left_s = self._deadline + _VERDICT_S - time.monotonic()
            if left_s <= 0:
                raise RendezvousError(self._why_none_came(written_in))
            if not self._wait([f"{self._name}/round"], left_s):
                continue
            round_id = self._store.get(f"{self._name}/round").decode()
            if round_id != written_in:
                self._store.set(self._key(round_id, self._rank), entry)
                written_in = round_id
            if not self._wait([self._key(round_id, "all")], min(_POLL_S, left_s)):
                continue
            problem, *entries = unpack_texts(self._store.get(self._key(round_id, "all")))
            # This is the result of an earlier attempt, so wait for a newer round.
            if entry not in entries:
                time.sleep(min(_POLL_S, left_s) / 10)
                continue
            if problem:
                raise RendezvousError(problem.decode())
            self._store.set(f"{self._key(round_id, self._rank)}/read", b"1")
            return entries

    def _why_none_came(self, written_in: str) -> str:
        who = f"rank {self._rank} of {self._size}"
        if not written_in:
            return f"{who}: rank 0 did not reach the store: timeout after {self._timeout_s:g} s"
        return (
            f"{who}: not all ranks came: timeout after {self._timeout_s:g} s, or rank 0 expects "
            f"another number of ranks, or another process claims to be rank {self._rank}"
        )

    def _missing(self, round_id: str, suffix: str) -> list[int]:
        """Returns the ranks whose keys do not exist at the deadline."""
        keys = {rank: self._key(round_id, rank) + suffix for rank in range(1, self._size)}
        if self._wait(list(keys.values()), self._deadline - time.monotonic()):
            return []
        return [rank for rank, key in keys.items() if not self._wait([key], 1e-3)]

    def _key(self, round_id: str, what: int | str) -> str:
        return f"{self._name}/{round_id}/{what}"

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Waits at most `seconds` for the keys. Returns True if they exist."""
        if not keys:
            return True
        started = time.monotonic()
        seconds = max(seconds, 1e-3)
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:
            if time.monotonic() - started < seconds / 2 and seconds > _POLL_S / 10:
                raise  # an early error is a failure of the store, not a timeout
            return False
        return True
