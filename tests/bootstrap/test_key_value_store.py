"""Ranks meet at a store, whatever earlier attempts have left there."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from bootstrap_stores import Dictionary, all_are, at_once, free_port
from unisono.bootstrap.key_value_store import KeyValueBootstrap, Store
from unisono.bootstrap.store import store_of
from unisono.config.launchers import TORCH_STORE
from unisono.errors import RendezvousError


def meet(
    store: Store, rank: int, size: int, timeout_s: float = 20, name: str = "job"
) -> Callable[[], Any]:
    board = KeyValueBootstrap(lambda _: store, name)
    return lambda: board.exchange(rank, size, f"text of {rank}".encode(), timeout_s)


def texts(size: int) -> list[bytes]:
    return [f"text of {rank}".encode() for rank in range(size)]


def test_all_get_all_texts() -> None:
    store = Dictionary()
    for size in (1, 2, 7):
        outcomes = at_once(*[meet(store, rank, size) for rank in reversed(range(size))])
        assert outcomes == [texts(size)] * size


def test_one_store_for_several_groups() -> None:
    store = Dictionary()
    calls = [meet(store, rank, 2, name=name) for name in "ab" for rank in (0, 1)]
    assert at_once(*calls) == [texts(2)] * 4


def test_again_and_again_without_a_word_between() -> None:
    store = Dictionary()

    def often(rank: int) -> Any:
        return [meet(store, rank, 3)() for _ in range(10)]

    assert at_once(*[lambda r=r: often(r) for r in range(3)]) == [[texts(3)] * 10] * 3


def test_256_ranks_meet_in_seconds() -> None:
    store = Dictionary()
    started = time.monotonic()
    assert at_once(*[meet(store, rank, 256) for rank in range(256)]) == [texts(256)] * 256
    assert time.monotonic() - started < 5


def test_what_failed_attempts_have_left_is_not_believed() -> None:
    store = Dictionary()
    # The first attempt missed a rank, in the second rank 0 was killed before the others came.
    failed = at_once(*[meet(store, rank, 4, 0.3) for rank in (0, 1, 2)])
    all_are(failed, RendezvousError, "after 0.3 s (timeout) these ranks of 4 are missing: [3]")
    store.set("job/round", "of a rank 0 that was killed")

    def late() -> Any:
        time.sleep(0.6)
        return meet(store, 0, 3)()

    # The next has fewer ranks, and those that came before its rank 0 see the old ones first.
    assert at_once(meet(store, 1, 3), late, meet(store, 2, 3)) == [texts(3)] * 3


def test_without_rank_0() -> None:
    outcomes = at_once(meet(Dictionary(), 1, 2, 0.2))
    text = "rank 1 of 2: rank 0 did not reach the store within 0.2 s (timeout)"
    all_are(outcomes, RendezvousError, text)


def test_ranks_that_disagree_about_the_size() -> None:
    store = Dictionary()
    outcomes = at_once(meet(store, 0, 2), meet(store, 1, 3))
    all_are(outcomes, RendezvousError, "rank 1 expects 3 ranks, rank 0 expects 2")


def test_two_claims_to_one_rank() -> None:
    store = Dictionary()
    outcomes = at_once(meet(store, 0, 2, 1), meet(store, 1, 2, 1), meet(store, 1, 2, 1))
    refused = [outcome for outcome in outcomes if outcome != texts(2)]
    all_are(refused, RendezvousError, "another process claims to be rank 1")
    assert len(refused) == 1


def test_a_rank_that_is_lost_before_it_has_read() -> None:
    store = Dictionary()

    def posts_and_dies() -> None:
        store.wait(["job/round"], timedelta(seconds=5))
        store.set(f"job/{store.get('job/round').decode()}/1", bytes(16) + b"\1\0\0\0\2\0\0\0")

    outcomes = at_once(meet(store, 0, 2, 0.5), posts_and_dies)
    all_are(outcomes[:1], RendezvousError, "ranks [1] were lost during the bootstrap")


def test_a_store_that_fails() -> None:
    class Gone(Dictionary):
        def wait(self, keys: list[str], timeout: timedelta, /) -> None:
            raise RuntimeError("Connection reset by peer")

    started = time.monotonic()
    outcomes = at_once(*[meet(Gone(), rank, 2) for rank in (0, 1)])
    all_are(outcomes, RendezvousError, "the store through which ranks find each other failed: Connection reset")
    assert time.monotonic() - started < 5


@pytest.mark.torch
def test_stores_of_torch() -> None:
    dist = pytest.importorskip("torch.distributed")
    port = free_port()
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", port, is_master=False) for _ in range(8)]
    prefixed = [dist.PrefixStore("x/", client) for client in clients]
    for stores in ([dist.HashStore()] * 4, clients, prefixed):
        calls = [meet(store, rank, len(stores)) for rank, store in enumerate(stores)]
        assert at_once(*calls) == [texts(len(stores))] * len(stores)
    missing = at_once(meet(dist.TCPStore("127.0.0.1", port, is_master=False), 0, 2, 0.5))
    all_are(missing, RendezvousError, "after 0.5 s (timeout) these ranks of 2 are missing: [1]")
    del server


@pytest.mark.torch
def test_the_store_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    dist = pytest.importorskip("torch.distributed")
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    board = store_of(f"{TORCH_STORE}127.0.0.1:{port}:job", b"secret")
    assert board is not None and board.secret == b"secret"
    calls = [lambda r=r: board.exchange(r, 3, b"%d" % r, 20) for r in range(3)]
    assert at_once(*calls) == [[b"0", b"1", b"2"]] * 3
    del agent
    monkeypatch.delenv("MASTER_PORT")
    all_are(at_once(calls[0]), RendezvousError, "MASTER_PORT")
