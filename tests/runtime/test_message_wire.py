"""Over a carrier whose messages end in any order, a group does what the reference executor does."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from carriers import Fabric
from crew import Crew, compare
from unisono import algorithms, native
from unisono.algorithms.layout import Hosts
from unisono.errors import PeerLostError, UnsupportedError
from unisono.types import DType, Op

EVERY = [(op, name) for op in Op for name in algorithms.names(op) if op is not Op.BARRIER]
LAYOUTS: list[Hosts] = [((0,), (1,)), ((0, 2), (1, 3)), ((0, 1, 2), (4, 3), (5,))]
UINT8 = list(DType).index(DType.UINT8)


class CarriedCrew(Crew):
    """Ranks on several pretended hosts, with a fabric between them."""

    def __init__(self, hosts: Hosts) -> None:
        self.layout = hosts
        self.fabric = Fabric(seed=len(hosts))
        super().__init__(sum(map(len, hosts)), 0, hosts)

    def make_groups(self, staging_bytes: int) -> list[native.Group]:
        found: dict[int, native.Group] = {}
        cores = native.usable_cores()
        for here in self.layout:
            nonce = secrets.token_bytes(16)
            fd = native.create_segment(len(here), 4, 1 << 18, nonce)
            for rank in here:
                found[rank] = native.Group.of_hosts(
                    os.dup(fd), rank, self.ranks, list(here), nonce, cores,
                    lambda kind, rank=rank: self.fabric.carrier(rank, kind),
                )  # fmt: skip
            os.close(fd)
        return [found[rank] for rank in range(self.ranks)]


@pytest.fixture(scope="module")
def crews() -> Iterator[list[CarriedCrew]]:
    made = [CarriedCrew(hosts) for hosts in LAYOUTS]
    yield made
    for crew in made:
        crew.close()


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_anything(data: st.DataObject, crews: list[CarriedCrew]) -> None:
    op, name = data.draw(st.sampled_from(EVERY))
    crew = data.draw(st.sampled_from(crews))
    try:
        algorithms.build(op, name, ranks=crew.ranks, hosts=crew.hosts)
    except UnsupportedError:
        assume(False)
    root = data.draw(st.integers(0, crew.ranks - 1))
    counts = [data.draw(st.sampled_from([0, 1, 400, 3000]))] * crew.ranks
    compare(
        crew, op, name, counts, root=root, dtype=data.draw(st.sampled_from(list(DType)[:12])),
        block_bytes=data.draw(st.sampled_from([64, 1024, 16384])),
        lead=data.draw(st.integers(0, 3)),
    )  # fmt: skip


def test_letters_come_in_order_however_large(crews: list[CarriedCrew]) -> None:
    one, other = crews[0].groups
    sent = [np.full(n, i, np.uint8) for i, n in enumerate([0, 1, 100_000, 10, 5000, 0] * 30)]
    parcels = [one.send(x.ctypes.data, x.nbytes, UINT8, 1, 7) for x in sent]
    one.carry_on()
    for i, x in enumerate(sent):
        out = np.empty_like(x)
        parcel = other.receive(out.ctypes.data, out.nbytes, UINT8, 0, 7)
        assert other.wait_parcel(parcel, 20, -1)
        assert (out == i).all()
    for parcel in parcels:
        assert one.wait_parcel(parcel, 20, -1)


def test_a_peer_is_sent_only_so_many_letters_that_it_does_not_take(
    crews: list[CarriedCrew],
) -> None:
    one, other = crews[0].groups
    x = np.zeros(16, np.uint8)
    parcels = [one.send(x.ctypes.data, x.nbytes, UINT8, 1, 8) for _ in range(500)]
    assert sum(parcel.done() for parcel in parcels) < 100
    one.carry_on()
    for _ in parcels:
        assert other.wait_parcel(other.receive(x.ctypes.data, x.nbytes, UINT8, 0, 8), 20, -1)
    for parcel in parcels:
        assert one.wait_parcel(parcel, 20, -1)


def test_what_a_carrier_cannot_bring_is_a_lost_peer() -> None:
    crew = CarriedCrew(((0,), (1,)))
    x = np.zeros(100_000, np.uint8)
    one, _ = crew.groups
    sent = one.send(x.ctypes.data, x.nbytes, UINT8, 1, 0)
    end = crew.fabric.ends[0, 1]
    with crew.fabric.lock:  # the payload fails on its way
        way = crew.fabric.sends[0, 1, 1]
        end.ended.append((way.pop().ticket, "the cable was pulled"))
    with pytest.raises(PeerLostError, match="rank 1 is gone: the cable was pulled"):
        one.wait_parcel(sent, 20, -1)
    crew.close()
