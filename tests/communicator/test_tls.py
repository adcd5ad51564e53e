"""Ranks of several hosts with TLS: results, the bytes that an eavesdropper sees, and refused
connections.

The hosts are simulated on this machine; the connections between them are real.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bootstrap_stores import free_port
from pretended_hosts import IPV6, spanning
from ranks import Me, Processes
from time_limits import limit_s, with_longer_timeouts
from tls import Authority, Tap, needs_openssl
from unisono import Communicator
from unisono.bootstrap import tcp_store
from unisono.errors import AuthenticationError, PeerLostError, RendezvousError
from unisono.transport import dialer

SECRET = {"UNISONO_JOB_SECRET": "what only the ranks of this test know"}
PSK = SECRET | {"UNISONO_TLS": "psk"}
MARK = b"a text that everybody would know again; "


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


both_families = pytest.mark.parametrize(
    "address",
    ["127.0.0.1", pytest.param(IPV6, marks=pytest.mark.skipif(not has_ipv6(), reason="no ::1"))],
)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


def everything(comm: Communicator) -> str:
    """Runs collectives of all lengths, asynchronous calls, and messages in both directions at
    once.
    """
    n, rank = comm.size, comm.rank
    for length in (0, 1, 7, 5000, 100_000, 1_500_000):
        values = np.arange(length, dtype=np.float64)
        total = comm.all_reduce(values * (rank + 1))
        assert np.array_equal(total, values * (n * (n + 1) // 2)), length
    works = [comm.all_reduce(np.full(3000, float(i)), async_op=True) for i in range(20)]
    assert [work.wait()[0] for work in works] == [float(i * n) for i in range(20)]
    pieces = np.repeat(np.arange(n, dtype=np.int64) + 10 * rank, 20_000)
    exchanged = comm.all_to_all(pieces)
    assert np.array_equal(exchanged, np.repeat(np.arange(n) * 10 + rank, 20_000))
    for length in (1, 300_000):
        sent = comm.send(np.full(length, float(rank)), (rank + 1) % n, async_op=True)
        came = np.empty(length)
        comm.recv(came, (rank - 1) % n)
        sent.wait()
        assert (came == (rank - 1) % n).all()
    array = comm.empty(300_000, np.float64)
    with comm.window(array) as window:
        window.put(np.full(300_000, float(rank)), (rank + 1) % n, signal=True)
        window.wait((rank - 1) % n)
        assert (array == (rank - 1) % n).all()
        assert (window.get(np.empty(300_000), (rank + 1) % n) == rank).all()
    for _ in range(200):
        comm.barrier()
    return "right"


@both_families
@pytest.mark.parametrize("streams", ["1", "3"])
def test_every_call_works_with_the_secret(streams: str, address: str) -> None:
    environ = PSK | {"UNISONO_STREAMS": streams}
    assert spanning(everything, [environ] * 3, per_host=2, address=address) == ["right"] * 3


@needs_openssl
@both_families
def test_every_call_works_with_certificates(authority: Authority, address: str) -> None:
    """Tests that certificates alone prove that a rank belongs to the job, without a job secret."""
    environs = [authority.member(f"rank{rank}") for rank in range(2)]
    assert spanning(everything, environs, address=address) == ["right"] * 2


def tapped(monkeypatch: pytest.MonkeyPatch, tap: Tap) -> None:
    """Routes all connections between ranks through the proxy `Tap`."""
    direct, meet = dialer.dial, tcp_store.dial

    def dial(to: tuple[str, int], source: str | None) -> socket.socket:
        return direct(tap.dial(to), source)

    def dial_meeting(addresses: list[Any], timeout_s: float) -> socket.socket:
        family, to = addresses[0]
        return meet([(family, tap.dial(to))], timeout_s)

    monkeypatch.setattr(dialer, "dial", dial)
    monkeypatch.setattr(tcp_store, "dial", dial_meeting)


def exchange_mark(comm: Communicator) -> bytes:
    """Sends a known text by a broadcast and by messages in both directions. Returns the received
    text.
    """
    text = np.frombuffer(MARK * 100, np.uint8).copy()
    other = 1 - comm.rank
    comm.broadcast(text, root=0)
    sent = comm.send(text, other, async_op=True)
    came = np.empty_like(text)
    comm.recv(came, other)
    sent.wait()
    comm.barrier()
    return bytes(came[: len(MARK)])


@pytest.mark.parametrize("tls", ["off", "psk"])
def test_an_eavesdropper_reads_nothing_under_tls(tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tap = Tap()
    tapped(monkeypatch, tap)
    assert spanning(exchange_mark, [SECRET | {"UNISONO_TLS": tls}] * 2) == [MARK] * 2
    received = bytes(tap.received)
    assert len(received) > 3 * 100 * len(MARK)
    # The text "addresses" is part of the ranks' bootstrap messages.
    assert [MARK in received, b'"addresses"' in received] == [tls == "off"] * 2


@pytest.mark.parametrize("kind", ["a broadcast", "a message"])
def test_changed_bytes_are_detected(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changing = []

    def change(chunk: bytes) -> bytes:
        if not changing or len(chunk) < 5000:
            return chunk
        return chunk[:3000] + bytes([chunk[3000] ^ 1]) + chunk[3001:]

    def body(comm: Communicator) -> Any:
        exchange_mark(comm)
        changing.append(True)
        text = np.zeros(1 << 20, np.uint8)
        if kind == "a broadcast":
            comm.broadcast(text, root=0)
        elif comm.rank == 0:
            comm.send(text, 1)
        else:
            comm.recv(text, 0)
        comm.barrier()
        return text.any()

    tapped(monkeypatch, Tap(change))
    found = spanning(body, [PSK] * 2)
    assert [type(one) for one in found] == [PeerLostError] * 2
    assert any("changed in transit (TLS)" in str(one) for one in found), found


# ---- refused ranks


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the time during which refused ranks retry."""
    monkeypatch.setattr(tcp_store, "PATIENCE_S", 0.3)


def refused(environs: list[dict[str, str]], **options: Any) -> list[Any]:
    """Returns the errors of two ranks, of which rank 0 refuses rank 1 and then waits for it."""
    return with_longer_timeouts(
        lambda timeout_s: spanning(everything, environs, timeout_s=timeout_s, **options),
        lambda found: not isinstance(found[1], AuthenticationError),
        first_s=2.0,
    )


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("wrong", [0, 1])
def test_different_tls_settings_are_refused(wrong: int) -> None:
    environs = [PSK, PSK]
    environs[wrong] = SECRET
    found = refused(environs)
    assert isinstance(found[0], RendezvousError)  # rank 1 did not join
    assert isinstance(found[1], AuthenticationError)
    here, there = ("off", "psk") if wrong == 1 else ("psk", "off")
    assert f"UNISONO_TLS is {here} here, {there} at the other end" in str(found[1])


@pytest.mark.usefixtures("impatient")
def test_another_secret_is_refused() -> None:
    other = PSK | {"UNISONO_JOB_SECRET": "a guess"}
    found = refused([PSK, other])
    assert [type(one) for one in found] == [RendezvousError, AuthenticationError]


@needs_openssl
@both_families
@pytest.mark.usefixtures("impatient")
def test_a_certificate_of_another_authority_is_refused(
    authority: Authority, tmp_path: Path, address: str
) -> None:
    stranger = Authority(tmp_path / "other").member("stranger")
    # this rank trusts the other ranks' certificates, but they do not trust its certificate
    stranger["UNISONO_TLS_CA"] = str(authority.file)
    environs = [authority.member("rank0"), stranger]
    found = refused(environs, address=address)
    assert [type(one) for one in found] == [RendezvousError, AuthenticationError]
    assert "unknown ca" in str(found[1])


# ---- failures, as without TLS


def under_tls(me: Me) -> None:
    """Joins, forks a child that closes all descriptors, and works until a peer is killed."""
    os.environ |= PSK | {"UNISONO_HOST_ID": str(me.rank), "UNISONO_INTERFACE": "=lo"}
    comm = me.join()
    data = np.ones(200_000)
    comm.all_reduce(data)
    child = os.fork()
    if child == 0:
        del comm
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    comm.all_reduce(data)
    assert (data == 9.0).all()
    me.say("worked")
    if me.rank == 2:
        time.sleep(60)
    me.attempt("over", comm.all_reduce, data)


def test_a_killed_rank_is_named() -> None:
    with Processes(under_tls, 3, name=f"tcp://127.0.0.1:{free_port()}") as ranks:
        ranks.wait_for("worked", range(3))
        killed_at = ranks.signal(2, signal.SIGKILL)
        for said in ranks.wait_for("over", [0, 1]):
            assert said["error"] == "PeerLostError"
            assert "rank 2" in said["text"]
            assert said["at"] - killed_at < limit_s(1)
