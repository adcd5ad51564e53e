"""The message library over MPI, with a simulated MPI whose messages arrive at a chosen moment."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any, cast

from unisono.transport.mpi_transport import MpiLibrary


class Network:
    """A head and a payload that arrive together, after `left` tests of requests."""

    def __init__(self, left: int) -> None:
        self.left = left

    def has_arrived(self) -> bool:
        self.left -= 1
        return self.left < 0


class Request:
    """A receive of one of the two messages, or a receive without a message."""

    def __init__(self, network: Network | None) -> None:
        self.network = network

    def Start(self) -> None:
        pass

    def Test(self) -> bool:
        return self.network is not None and self.network.has_arrived()


class Comm:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.posted = 0

    def Recv_init(self, *_: object) -> Request:
        self.posted += 1
        return Request(self.network if self.posted == 1 else None)

    def Irecv(self, *_: object) -> Request:
        return Request(self.network)


def library(network: Network) -> MpiLibrary:
    def test_some(requests: list[Request]) -> list[int]:
        return [i for i, request in enumerate(requests) if request.Test()]

    mpi = SimpleNamespace(
        ANY_SOURCE=-1, BYTE=None, Exception=OSError, Request=SimpleNamespace(Testsome=test_some),
        buffer=SimpleNamespace(fromaddress=lambda address, size: bytearray(size)),
    )  # fmt: skip
    made = MpiLibrary(cast(ModuleType, mpi), cast(Any, Comm(network)), 1)
    made.listen(0, 64, 2)
    assert not made.receive(1, 0, 64, 5)
    return made


def test_a_payload_is_never_found_before_a_head_that_has_arrived() -> None:
    for tests in range(1, 6):
        polled = library(Network(tests))
        heads, payloads = 0, 0
        for _ in range(6):
            found = polled.poll()
            filled, ended = found if isinstance(found, tuple) else (found, [])
            heads, payloads = heads + filled, payloads + len(ended)
            assert heads or not payloads, f"after {tests} tests"
        assert (heads, payloads) == (1, 1)
