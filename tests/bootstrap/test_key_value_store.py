"""Bootstrap through a key-value store that contains values of earlier attempts."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from bootstrap_stores import Dictionary, all_are, at_once, free_port
from time_limits import limit_s
from unisono.bootstrap.key_value_store import KeyValueBootstrap, Store
from unisono.bootstrap.store import store_of
from unisono.config.launchers import TORCH_STORE
from unisono.errors import RendezvousError


def exchange(
    store: Store, rank: int, size: int, timeout_s: float = 20, name: str = "job"
) -> Callable[[], Any]:
    bootstrap_store = KeyValueBootstrap(lambda _: store, name)
    return lambda: bootstrap_store.exchange(rank, size, f"text of {rank}".encode(), timeout_s)


def texts(size: int) -> list[bytes]:
    return [f"text of {rank}".encode() for rank in range(size)]


def test_all_ranks_get_all_texts() -> None:
    store = Dictionary()
    for size in (1, 2, 7):
        outcomes = at_once(*[exchange(store, rank, size) for rank in reversed(range(size))])
        assert outcomes == [texts(size)] * size


def test_several_groups_use_one_store() -> None:
    store = Dictionary()
    calls = [exchange(store, rank, 2, name=name) for name in "ab" for rank in (0, 1)]
    assert at_once(*calls) == [texts(2)] * 4


def test_exchanges_repeat_without_synchronisation() -> None:
    store = Dictionary()

    def often(rank: int) -> Any:
        return [exchange(store, rank, 3)() for _ in range(10)]

    assert at_once(*[lambda r=r: often(r) for r in range(3)]) == [[texts(3)] * 10] * 3


def test_256_ranks_exchange_texts_in_seconds() -> None:
    store = Dictionary()
    assert at_once(*[exchange(store, rank, 256, 20) for rank in range(256)]) == [texts(256)] * 256


def test_remains_of_failed_attempts_are_ignored() -> None:
    store = Dictionary()
    # In the first attempt a rank was missing. In the second attempt, rank 0 was killed before the
    # other ranks arrived.
    failed = at_once(*[exchange(store, rank, 4, 20 if rank else 2) for rank in (0, 1, 2)])
    all_are(failed, RendezvousError, ": timeout after 2 s: these ranks of 4 are missing: [3]")
    store.set("job/round", "of a rank 0 that was killed")

    def late() -> Any:
        time.sleep(0.6)
        return exchange(store, 0, 3)()

    # The next attempt has fewer ranks. Ranks that arrive before rank 0 first read the old values.
    assert at_once(exchange(store, 1, 3), late, exchange(store, 2, 3)) == [texts(3)] * 3


def test_a_missing_rank_0_is_named() -> None:
    outcomes = at_once(exchange(Dictionary(), 1, 2, 0.2))
    text = "rank 1 of 2: rank 0 did not reach the store: timeout after 0.2 s"
    all_are(outcomes, RendezvousError, text)


def test_ranks_with_different_sizes_are_refused() -> None:
    store = Dictionary()
    outcomes = at_once(exchange(store, 0, 2), exchange(store, 1, 3))
    all_are(outcomes, RendezvousError, "rank 1 expects 3 ranks, rank 0 expects 2")


def test_two_claims_to_one_rank_are_refused() -> None:
    store = Dictionary()
    outcomes = at_once(exchange(store, 0, 2, 1), exchange(store, 1, 2, 1), exchange(store, 1, 2, 1))
    refused = [outcome for outcome in outcomes if outcome != texts(2)]
    all_are(refused, RendezvousError, "another process claims to be rank 1")
    assert len(refused) == 1


def test_a_rank_lost_before_it_reads_is_named() -> None:
    store = Dictionary()

    def writes_and_dies() -> None:
        store.wait(["job/round"], timedelta(seconds=20))
        store.set(f"job/{store.get('job/round').decode()}/1", bytes(16) + b"\1\0\0\0\2\0\0\0")

    outcomes = at_once(exchange(store, 0, 2, 2), writes_and_dies)
    all_are(outcomes[:1], RendezvousError, "ranks [1] were lost during the bootstrap")


def test_a_failed_store_is_reported() -> None:
    class FailedStore(Dictionary):
        def wait(self, keys: list[str], timeout: timedelta, /) -> None:
            raise RuntimeError("Connection reset by peer")

    started = time.monotonic()
    outcomes = at_once(*[exchange(FailedStore(), rank, 2, 60) for rank in (0, 1)])
    all_are(
        outcomes,
        RendezvousError,
        "the store through which ranks find each other failed: Connection reset",
    )
    assert time.monotonic() - started < limit_s(1)


@pytest.mark.torch
def test_stores_of_torch_serve() -> None:
    dist = pytest.importorskip("torch.distributed")
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", port, is_master=False) for _ in range(8)]
    prefixed = [dist.PrefixStore("x/", client) for client in clients]
    for stores in ([dist.HashStore()] * 4, clients, prefixed):
        calls = [exchange(store, rank, len(stores)) for rank, store in enumerate(stores)]
        assert at_once(*calls) == [texts(len(stores))] * len(stores)
    missing = at_once(exchange(dist.TCPStore("127.0.0.1", port, is_master=False), 0, 2, 0.5))
    all_are(missing, RendezvousError, ": timeout after 0.5 s: these ranks of 2 are missing: [1]")
    del server


@pytest.mark.torch
def test_the_store_of_torchrun_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    dist = pytest.importorskip("torch.distributed")
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    bootstrap_store = store_of(f"{TORCH_STORE}127.0.0.1:{port}:job", b"secret")
    assert bootstrap_store is not None and bootstrap_store.secret == b"secret"
    calls = [lambda r=r: bootstrap_store.exchange(r, 3, b"%d" % r, 20) for r in range(3)]
    assert at_once(*calls) == [[b"0", b"1", b"2"]] * 3
    del agent
    monkeypatch.delenv("MASTER_PORT")
    all_are(at_once(calls[0]), RendezvousError, "MASTER_PORT")
