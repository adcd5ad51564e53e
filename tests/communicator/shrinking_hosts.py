"""Ranks of one machine that are configured as ranks of several hosts, for tests of recovery."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from bootstrap_stores import free_port
from ranks import Me, Processes
from unisono import Communicator, PeerLostError

RANKS = 4
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


def slow(*values: object) -> Any:
    """Returns a test case with these parameters that is marked as slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def over_hosts(
    body: Callable[[Me], Any], layout: Sequence[int], added: Mapping[str, str] = NO_VARIABLES
) -> Processes:
    """Starts ranks that run `body`. `layout` has the host of each rank, `added` has further
    variables of their environment.
    """
    port = free_port()

    def environment(rank: int) -> dict[str, str]:
        return {
            "UNISONO_HOST_ID": f"host{layout[rank]}", "UNISONO_INTERFACE": "=lo", **added
        }  # fmt: skip

    name = f"tcp://127.0.0.1:{port}"
    return Processes(body, len(layout), name=name, environment=environment)


def says(me: Me, comm: Communicator, event: str = "shrunk") -> None:
    """Exchanges data in the group and checks them. Then tells the test which ranks are members of
    the group.
    """
    former = comm.all_gather(np.array([me.rank])).tolist()
    for count in (3, 200_000):
        total = comm.all_reduce(np.full(count, 10.0**me.rank))
        assert (total == sum(10.0**rank for rank in former)).all()
    me.say(event, former=former, rank=comm.rank, ranks=comm.former_ranks, hosts=comm.hosts)


def until_lost(comm: Communicator) -> None:
    with pytest.raises(PeerLostError):
        while True:
            comm.all_reduce(np.ones(1000))


def joined(me: Me) -> Communicator:
    comm = me.join()
    comm.all_reduce(np.ones(10))
    assert len(comm.hosts) > 1
    me.say("ready")
    return comm
