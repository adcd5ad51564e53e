"""Ranks exchange hosts, addresses and rank 0's data through a bootstrap store.

The exchanged facts are claims without proof. Ranks with equal host keys are only *candidates* for
one host. They prove that they are on one host by sharing memory (`bootstrap.host_group`).
"""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unisono.bootstrap.group_config import StagingShape, shape_for
from unisono.bootstrap.segment_creation import can_hold_heaps
from unisono.bootstrap.store import BootstrapStore
from unisono.errors import RendezvousError
from unisono.native import usable_cores
from unisono.rank_connections import PeerInfo
from unisono.transport import random_secret

_VERSION = 3
"""Format version of the exchanged texts; ranks with other versions are rejected."""
_WORLD_BYTES = 16
_SPANNING_DEPTH = 4
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKey:
    """Identity of a host. Ranks with equal keys may be on one host.

    The key holds the kernel's boot id, its network and user namespaces, the user id, and the user's
    own name for the host.
    """

    boot: str
    network: int
    users: int
    user: int
    host_id: str = ""

    def same_network(self, other: HostKey) -> bool:
        """Returns True if ranks with these keys share one loopback interface."""
        return (self.boot, self.network) == (other.boot, other.network)


def this_host(host_id: str = "") -> HostKey:
    """Returns the key of this process's host. Ranks with different `host_id` count as ranks of
    different hosts, even on one machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = socket.gethostname()
    return HostKey(
        boot=boot,
        network=_namespace("net"),
        users=_namespace("user"),
        user=os.getuid(),
        host_id=host_id,
    )


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Facts that a rank contributes to the exchange."""

    rank: int
    size: int
    timeout_s: float
    addresses: Sequence[tuple[str, int]]
    """IP literal and port at which the rank listens for other hosts, one pair for each rail."""
    staging_bytes: int
    """Bytes of staging memory on the host with the most ranks, for all its ranks together. Rank 0's
    value applies to all ranks.
    """
    host: HostKey = field(default_factory=this_host)
    cores: int = field(default_factory=usable_cores)
    heaps: bool = field(default_factory=can_hold_heaps)
    """Ability of this process to create shared heaps."""
    rank0_data: bytes = b""
    """Data that rank 0 sends to all other ranks."""
    tls: str = "off"
    """The value of UNISONO_TLS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldFacts:
    """Facts about a world; equal on all its ranks."""

    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each host according to their host keys, which are not proven yet. Hosts are in
    the order of their first ranks.
    """
    peer_infos: tuple[PeerInfo, ...]
    """Peer info of all ranks, by rank."""
    world: bytes
    """16 bytes that identify this world."""
    rank0_data: bytes
    """Data that rank 0 sent."""
    secret: bytes = field(repr=False)
    """The job's secret, else a random secret that rank 0 sent through the store."""
    shape: StagingShape
    """Shape of the staging memory in every host's segment, and in the mirrors: each rank's private
    copies of the staging memory of ranks on other hosts.
    """
    heaps: bool
    """Ability of all ranks to create shared heaps."""

    def host_of(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of this rank's host."""
        return self.hosts[self.peer_infos[rank].host]


def exchange_facts(
    bootstrap_store: BootstrapStore, rank_facts: RankFacts, *, by_address: bool = True
) -> WorldFacts:
    """Exchanges facts with the other ranks. Returns the world's facts, equal on all ranks.

    `by_address`: ranks of different hosts will connect to the exchanged addresses, which are
    checked. Pass False if MPI connects the hosts.

    Raises `RendezvousError` if ranks are missing, or cannot reach each other at their addresses.
    Raises `AuthenticationError` if this rank is rejected.

    >>> from unisono.bootstrap.tcp_store import TcpStore
    >>> alone = RankFacts(rank=0, size=1, timeout_s=1.0, addresses=[], staging_bytes=1 << 24)
    >>> exchange_facts(TcpStore("tcp://127.0.0.1:29400", None), alone).hosts
    ((0,),)
    """
    mine = _pack(rank_facts, bootstrap_store.secret is not None)
    texts = bootstrap_store.exchange(rank_facts.rank, rank_facts.size, mine, rank_facts.timeout_s)
    all_facts = [_ParsedFacts.unpack(rank, text) for rank, text in enumerate(texts)]
    first = all_facts[0]
    _require_alike(all_facts)
    hosts = _hosts(all_facts)
    if by_address:
        _require_reachable(all_facts, hosts)
    rails = min(len(facts.addresses) for facts in all_facts)
    host_of_rank = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    fullest, fewest_cores = max(map(len, hosts)), min(facts.cores for facts in all_facts)
    return WorldFacts(
        hosts=hosts,
        peer_infos=tuple(
            PeerInfo(rank=rank, host=host_of_rank[rank], addresses=facts.addresses[:rails])
            for rank, facts in enumerate(all_facts)
        ),
        world=first.world,
        rank0_data=first.rank0_data,
        secret=bootstrap_store.secret or first.secret,
        shape=shape_among(len(hosts), fullest, fewest_cores, first.staging_bytes),
        heaps=all(facts.heaps for facts in all_facts),
    )


def shape_among(hosts: int, fullest: int, cores: int, staging_bytes: int) -> StagingShape:
    """Chooses the staging shape. Several hosts need more blocks in flight than one host, since some
    blocks are in the network while others wait.
    """
    shape = shape_for(fullest, cores, staging_bytes)
    if hosts == 1:
        return shape
    buffer_bytes = shape.buffer_bytes * shape.depth // _SPANNING_DEPTH
    return StagingShape(
        depth=_SPANNING_DEPTH, buffer_bytes=buffer_bytes // _PAGE_BYTES * _PAGE_BYTES
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParsedFacts:
    """A rank's facts, parsed from its text."""

    host: HostKey
    name: str
    addresses: tuple[tuple[str, int], ...]
    cores: int
    heaps: bool
    has_secret: bool
    tls: str
    staging_bytes: int
    world: bytes
    secret: bytes
    rank0_data: bytes

    @classmethod
    def unpack(cls, rank: int, text: bytes) -> _ParsedFacts:
        """Parses a text. Raises `RendezvousError` for a text that this version would not write."""
        try:
            facts: dict[str, Any] = json.loads(text)
            if facts["version"] != _VERSION:
                raise ValueError(f"version {facts['version']}")
            return cls(
                host=HostKey(**{name: _plain(value) for name, value in facts["host"].items()}),
                name=str(facts["name"]),
                addresses=tuple(
                    (str(ipaddress.ip_address(ip)), _within(port, 1 << 16))
                    for ip, port in facts["addresses"]
                ),
                cores=_within(facts["cores"], 1 << 32),
                heaps=bool(facts["heaps"]),
                has_secret=bool(facts["has_secret"]),
                tls=str(facts["tls"]),
                staging_bytes=_within(facts.get("staging_bytes", 0), 1 << 62),
                world=base64.b64decode(facts.get("world", "")),
                secret=base64.b64decode(facts.get("secret", "")),
                rank0_data=base64.b64decode(facts.get("word", "")),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RendezvousError(
                f"rank {rank} sent facts of an unknown form: does it run another unisono version?"
            ) from error


def _plain(value: Any) -> Any:
    """Returns the value of a host key's field. Raises `ValueError` unless it is a text or an
    integer.
    """
    if not isinstance(value, (str, int)):
        raise ValueError(f"{value!r} in a host's key: expected text or a whole number")
    return value


def _within(number: Any, end: int) -> int:
    """Returns the number. Raises `ValueError` unless it is a whole number from 0 to `end` - 1."""
    if not isinstance(number, int) or not 0 <= number < end:
        raise ValueError(f"{number!r}: expected a whole number below {end}")
    return number


def _pack(rank_facts: RankFacts, has_secret: bool) -> bytes:
    facts: dict[str, Any] = {
        "version": _VERSION,
        "host": asdict(rank_facts.host),
        "name": socket.gethostname(),
        "addresses": [list(address) for address in rank_facts.addresses],
        "cores": rank_facts.cores,
        "heaps": rank_facts.heaps,
        "has_secret": has_secret,
        "tls": rank_facts.tls,
    }
    if rank_facts.rank == 0:
        facts["staging_bytes"] = rank_facts.staging_bytes
        facts["world"] = _text(secrets.token_bytes(_WORLD_BYTES))
        facts["secret"] = "" if has_secret else _text(random_secret())
        facts["word"] = _text(rank_facts.rank0_data)
    return json.dumps(facts).encode()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _hosts(all_facts: Sequence[_ParsedFacts]) -> tuple[tuple[int, ...], ...]:
    ranks: dict[HostKey, list[int]] = {}
    for rank, facts in enumerate(all_facts):
        ranks.setdefault(facts.host, []).append(rank)
    return tuple(map(tuple, ranks.values()))


def _require_alike(all_facts: Sequence[_ParsedFacts]) -> None:
    """Requires that all ranks or none have a job secret, and that all use the same UNISONO_TLS."""
    for rank, facts in enumerate(all_facts):
        if facts.tls != all_facts[0].tls:
            raise RendezvousError(
                f"rank {rank} ({facts.name}) has UNISONO_TLS={facts.tls}, rank 0 "
                f"({all_facts[0].name}) has UNISONO_TLS={all_facts[0].tls}: give all ranks the same"
            )
        if facts.has_secret != all_facts[0].has_secret:
            with_, without = (rank, 0) if facts.has_secret else (0, rank)
            raise RendezvousError(
                f"rank {with_} has a job secret (UNISONO_JOB_SECRET), rank {without} has none: "
                "give it to all ranks or to none"
            )


def _require_reachable(all_facts: Sequence[_ParsedFacts], hosts: Sequence[Sequence[int]]) -> None:
    """Requires that every rank listens at an address that other hosts can reach, as far as can be
    checked."""
    if len(hosts) == 1:
        return
    here = [all_facts[ranks[0]] for ranks in hosts]
    for rank, facts in enumerate(all_facts):
        if not facts.addresses:
            raise RendezvousError(f"rank {rank} ({facts.name}) listens on no address")
        addresses = [ipaddress.ip_address(ip) for ip, _ in facts.addresses]
        for ip in addresses:
            if ip.is_loopback and not all(facts.host.same_network(other.host) for other in here):
                raise RendezvousError(
                    f"rank {rank} ({facts.name}) listens on {ip}, which ranks of other hosts "
                    "cannot reach: choose one of its interfaces by UNISONO_INTERFACE"
                )
        if addresses[0].version != ipaddress.ip_address(all_facts[0].addresses[0][0]).version:
            raise RendezvousError(
                f"rank 0 ({all_facts[0].name}) listens on {all_facts[0].addresses[0][0]}, rank "
                f"{rank} ({facts.name}) on {addresses[0]}: choose addresses of one version by "
                "UNISONO_SOCKET_FAMILY=AF_INET or AF_INET6, or interfaces by UNISONO_INTERFACE"
            )
