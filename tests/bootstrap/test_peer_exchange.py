"""Ranks exchange facts, and the ranks of one host agree on the shape of their shared segment."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootstrap_stores import Dictionary, all_are, at_once, free_port
from unisono.bootstrap import peer_exchange
from unisono.bootstrap.group_config import JoinedGroup, shape_for
from unisono.bootstrap.host_group import join_host_group
from unisono.bootstrap.key_value_store import KeyValueBootstrap
from unisono.bootstrap.peer_exchange import (
    HostKey,
    RankFacts,
    WorldFacts,
    exchange_facts,
    this_host,
)
from unisono.bootstrap.tcp_store import TcpStore
from unisono.errors import RendezvousError
from unisono.rank_connections.group_endpoint import PeerInfo

HERE = this_host()


def host(name: str) -> HostKey:
    """Returns the key of a simulated host on this machine. Simulated hosts reach each other over
    loopback.
    """
    return dataclasses.replace(HERE, host_id=name)


def exchanged(
    hosts: Sequence[HostKey], *, secret: bytes | None = None, **changes: Sequence[Any]
) -> list[Any]:
    """Returns the result of `exchange_facts` on each rank; `hosts[rank]` is the host of a rank.

    `changes` replaces fields of the facts. It has a list with one value per rank for each replaced
    field.
    """
    point = f"tcp://127.0.0.1:{free_port()}"

    def call(rank: int) -> Callable[[], Any]:
        rank_facts = RankFacts(
            rank=rank,
            size=len(hosts),
            timeout_s=20,
            addresses=[("127.0.0.1", 20000 + rank), ("127.0.0.2", 20000 + rank)],
            staging_bytes=1 << 20,
            host=hosts[rank],
            cores=8,
            rank0_data=f"word of {rank}".encode(),
        )
        own = {name: values[rank] for name, values in changes.items()}
        bootstrap_store = TcpStore(point, secret)
        return lambda: exchange_facts(bootstrap_store, dataclasses.replace(rank_facts, **own))

    return at_once(*[call(rank) for rank in range(len(hosts))])


def test_all_ranks_get_the_same_facts() -> None:
    outcomes = exchanged([host(name) for name in "abbcab"])
    found = outcomes[0]
    assert isinstance(found, WorldFacts), found
    assert outcomes == [found] * 6
    assert found.hosts == ((0, 4), (1, 2, 5), (3,))
    assert found.host_of(5) == (1, 2, 5)
    assert found.peer_infos[2] == PeerInfo(
        rank=2, host=1, addresses=(("127.0.0.1", 20002), ("127.0.0.2", 20002))
    )
    assert found.rank0_data == b"word of 0"
    # The shape is chosen for 3 ranks, as on the host with the most ranks, and for rank 0's staging
    # size. Since there are several hosts, more buffers share the same memory than on a single host.
    whole = shape_for(3, 8, 1 << 20)
    assert found.shape.depth == 4 > whole.depth
    spare = whole.depth * whole.buffer_bytes - found.shape.depth * found.shape.buffer_bytes
    assert 0 <= spare < 4 * 4096
    assert len(found.world) == 16 and len(found.secret) == 32
    assert repr(found.secret) not in repr(found)


def test_every_world_has_its_own_id_and_secret() -> None:
    first, second = (exchanged([HERE])[0] for _ in range(2))
    assert first.world != second.world
    assert first.secret != second.secret
    assert exchanged([HERE, HERE], secret=b"given")[1].secret == b"given"


def test_rank_0_and_the_smallest_host_decide_the_shape() -> None:
    outcomes = exchanged([HERE] * 3, staging_bytes=[1 << 22, 1, 2], cores=[8, 2, 8])
    assert [found.shape for found in outcomes] == [shape_for(3, 2, 1 << 22)] * 3


def test_one_host_without_heaps_decides_for_all() -> None:
    outcomes = exchanged([HERE, host("a")], heaps=[True, False])
    assert [found.heaps for found in outcomes] == [False, False]
    assert exchanged([HERE, host("a")], heaps=[True, True])[0].heaps


def test_rails_are_limited_by_the_rank_with_fewest() -> None:
    addresses = [[("127.0.0.1", 1), ("127.0.0.2", 1)], [("127.0.0.1", 2)]]
    found = exchanged([host("a"), host("b")], addresses=addresses)[0]
    assert [contact.addresses for contact in found.peer_infos] == [
        (("127.0.0.1", 1),), (("127.0.0.1", 2),)
    ]  # fmt: skip


def test_ranks_of_one_host_need_no_address() -> None:
    assert exchanged([HERE, HERE], addresses=[[], []])[0].hosts == ((0, 1),)
    all_are(
        exchanged([HERE, host("b")], addresses=[[("127.0.0.1", 1)], []]),
        RendezvousError,
        "listens on no address",
    )


@pytest.mark.parametrize("change", [{"network": 1}, {"boot": "another"}])
def test_loopback_of_different_hosts_is_refused(change: dict[str, Any]) -> None:
    away = dataclasses.replace(HERE, **change)
    outside, inside = [("192.0.2.1", 1)], [("127.0.0.1", 1)]
    assert exchanged([HERE, away], addresses=[outside, outside])[0].hosts == ((0,), (1,))
    outcomes = exchanged([HERE, away], addresses=[outside, inside])
    all_are(outcomes, RendezvousError, "listens on 127.0.0.1, which ranks of other hosts cannot")
    all_are(outcomes, RendezvousError, "UNISONO_INTERFACE")


def test_addresses_of_two_versions_are_refused() -> None:
    addresses = [[("192.0.2.1", 1)], [("2001:db8::1", 1)]]
    outcomes = exchanged([HERE, host("b")], addresses=addresses)
    all_are(outcomes, RendezvousError, "choose addresses of one version by UNISONO_SOCKET_FAMILY")


def test_a_secret_of_only_some_ranks_is_refused() -> None:
    store = Dictionary()  # a store without a secret

    def call(rank: int, secret: bytes | None) -> WorldFacts:
        bootstrap_store = KeyValueBootstrap(lambda _: store, "job", secret)
        return exchange_facts(
            bootstrap_store,
            RankFacts(rank=rank, size=2, timeout_s=20, addresses=[], staging_bytes=1 << 20),
        )

    outcomes = at_once(lambda: call(0, None), lambda: call(1, b"secret"))
    all_are(outcomes, RendezvousError, "rank 1 has a job secret (UNISONO_JOB_SECRET), rank 0 has")


@given(st.one_of(st.binary(max_size=40), st.dictionaries(st.text(), st.integers()).map(str)))
def test_malformed_facts_are_refused(text: str | bytes) -> None:
    data = text.encode() if isinstance(text, str) else text
    with pytest.raises(RendezvousError, match="rank 3 sent facts of an unknown form"):
        peer_exchange._ParsedFacts.unpack(3, data)


@given(
    st.sampled_from(["version", "host", "name", "addresses", "cores", "has_secret", "word"]),
    st.one_of(st.none(), st.integers(), st.text(), st.lists(st.text(), min_size=1), st.floats()),
)
def test_facts_with_a_wrong_value_are_read_or_refused(fact: str, value: Any) -> None:
    rank_facts = RankFacts(rank=0, size=1, timeout_s=1, addresses=[], staging_bytes=1 << 20)
    facts = json.loads(peer_exchange._pack(rank_facts, False)) | {fact: value}
    with contextlib.suppress(RendezvousError):
        peer_exchange._ParsedFacts.unpack(0, json.dumps(facts).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"cores": float("inf")},
        {"cores": -1},
        {"addresses": [["127.0.0.1", 70_000]]},
        {"host": {"boot": [], "network": 1, "users": 1, "user": 1}},
        {"host": []},
    ],
)
def test_impossible_facts_are_refused(change: dict[str, Any]) -> None:
    rank_facts = RankFacts(rank=0, size=1, timeout_s=1, addresses=[], staging_bytes=1 << 20)
    facts = json.loads(peer_exchange._pack(rank_facts, False)) | change
    for text in (json.dumps(facts), "[" * 100_000):
        with pytest.raises(RendezvousError, match="rank 3 sent facts of an unknown form"):
            peer_exchange._ParsedFacts.unpack(3, text.encode())


# ---- formation of groups


def formed(outcomes: Sequence[WorldFacts], timeout_s: float = 10) -> list[Any]:
    calls = [
        lambda rank=rank, found=found: join_host_group(found, rank, timeout_s=timeout_s)
        for rank, found in enumerate(outcomes)
    ]
    return at_once(*calls)


def test_the_ranks_of_a_host_share_a_segment_of_the_common_shape() -> None:
    outcomes = exchanged([host(name) for name in "abbcab"], cores=[8] * 6)
    groups = formed(outcomes)
    assert all(isinstance(met, JoinedGroup) for met in groups), groups
    assert [met.group.ranks for met in groups] == [2, 3, 3, 1, 2, 3]
    nonces = [met.nonce for met in groups]
    assert len(set(nonces)) == 3 and nonces[0] == nonces[4] and nonces[1] == nonces[2] == nonces[5]
    for met in groups:
        shape = (met.group.depth, met.group.buffer_bytes)
        assert shape == dataclasses.astuple(outcomes[0].shape)
        assert met.rank0_data == b"word of 0"
        met.group.close()


def test_ranks_with_equal_keys_on_two_hosts_are_refused() -> None:
    outcomes = exchanged([HERE, HERE, host("b")])
    outcome = at_once(
        lambda: join_host_group(outcomes[0], 0, timeout_s=0.3)
    )  # rank 1 has the same host key, but does not join, as if it were on another host
    all_are(outcome, RendezvousError, "ranks [0, 1] have equal host keys")
    all_are(outcome, RendezvousError, "are missing: [1] (if the ranks are on several hosts")


def test_a_missing_rank_is_named_by_its_world_rank() -> None:
    found = exchanged([host("a"), host("b"), host("b"), host("b")])[0]
    outcomes = at_once(
        lambda: join_host_group(found, 1, timeout_s=2),
        lambda: join_host_group(found, 3, timeout_s=20),
    )
    all_are(outcomes, RendezvousError, "these ranks of 3 are missing: [2]")
