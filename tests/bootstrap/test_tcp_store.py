"""Bootstrap at tcp://host:port, with ranks that are missing, invalid or unknown."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootstrap_stores import all_are, at_once, free_port
from time_limits import PATIENCE_S, limit_s
from unisono.bootstrap import tcp_address, tcp_store, tcp_store_frames, tcp_store_server
from unisono.bootstrap.tcp_store import TcpStore
from unisono.bootstrap.tcp_store_frames import Hello
from unisono.errors import AuthenticationError, RendezvousError
from unisono.transport.handshake import Handshake

SECRET = b"a secret of this job"


@pytest.fixture
def rendezvous() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_address, "PATIENCE_S", 0.3)
    monkeypatch.setattr(tcp_store, "PATIENCE_S", 0.3)


@pytest.fixture
def long_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes rank 0 refuse ranks after a failure until all have come, also on a busy machine."""
    monkeypatch.setattr(tcp_store_server, "_REFUSAL_S", PATIENCE_S)


def exchange(
    rendezvous: str, rank: int, size: int, timeout_s: float = 20, secret: bytes | None = None
) -> Callable[[], Any]:
    bootstrap_store = TcpStore(rendezvous, secret)
    return lambda: bootstrap_store.exchange(rank, size, f"text of {rank}".encode(), timeout_s)


def texts(size: int) -> list[bytes]:
    return [f"text of {rank}".encode() for rank in range(size)]


@contextlib.contextmanager
def caller(rendezvous: str) -> Iterator[socket.socket]:
    """Connects to the rendezvous from a process that is not a rank."""
    port = tcp_address.parse(rendezvous).port
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), 5)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with connection:
        yield connection


@pytest.mark.parametrize("secret", [None, SECRET])
def test_all_ranks_get_all_texts(rendezvous: str, secret: bytes | None) -> None:
    ranks = random.sample(range(7), 7)
    outcomes = at_once(*[exchange(rendezvous, rank, 7, secret=secret) for rank in ranks])
    assert outcomes == [texts(7)] * 7


def test_large_and_empty_texts_arrive(rendezvous: str) -> None:
    brought = [b"", bytes(range(256)) * 4096, b"x"]
    bootstrap_store = TcpStore(rendezvous, SECRET)
    calls = [lambda r=r: bootstrap_store.exchange(r, 3, brought[r], 20) for r in range(3)]
    assert at_once(*calls) == [brought] * 3
    with pytest.raises(ValueError, match="at most 1048576"):
        bootstrap_store.exchange(0, 1, bytes((1 << 20) + 1), 1)


def test_ranks_exchange_over_ipv6() -> None:
    rendezvous = f"tcp://[::1]:{free_port('::1')}"
    assert at_once(exchange(rendezvous, 0, 2), exchange(rendezvous, 1, 2)) == [texts(2)] * 2


def test_localhost_serves_one_host() -> None:
    rendezvous = f"tcp://localhost:{free_port()}"
    assert at_once(exchange(rendezvous, 0, 2), exchange(rendezvous, 1, 2)) == [texts(2)] * 2


def test_rank_0_may_start_last(rendezvous: str) -> None:
    def late() -> Any:
        time.sleep(0.5)
        return exchange(rendezvous, 0, 3)()

    assert at_once(exchange(rendezvous, 2, 3), late, exchange(rendezvous, 1, 3)) == [texts(3)] * 3


def test_one_address_serves_again_and_again(rendezvous: str) -> None:
    def often(rank: int) -> Any:
        return [exchange(rendezvous, rank, 3, secret=SECRET)() for _ in range(10)]

    assert at_once(*[lambda r=r: often(r) for r in range(3)]) == [[texts(3)] * 10] * 3


def test_256_ranks_exchange_texts_in_seconds(rendezvous: str) -> None:
    # an idle machine takes 0.3 s
    outcomes = at_once(*[exchange(rendezvous, rank, 256, 20, SECRET) for rank in range(256)])
    assert outcomes == [texts(256)] * 256


# ---- missing and invalid ranks


def test_a_missing_rank_is_named_on_all_ranks(rendezvous: str) -> None:
    calls = [exchange(rendezvous, rank, 5, 20 if rank else 2) for rank in (0, 2, 4)]
    told = ": timeout after 2 s: these ranks of 5 are missing: [1, 3]"
    all_are(at_once(*calls), RendezvousError, told)


def test_a_missing_rank_0_is_named(rendezvous: str) -> None:
    alone = at_once(exchange(rendezvous, 1, 2, 0.3))
    all_are(alone, RendezvousError, "rank 0 did not listen: timeout after 0.3 s: ")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_timeout_at_loopback_explains_loopback(host: str) -> None:
    """Tests that the error after a timeout has a hint: loopback is a different machine on each
    host.
    """
    rendezvous = f"tcp://{host}:{free_port()}"
    hint = f"{host} is a different machine on each host: with several hosts, set UNISONO_RENDEZVOUS"
    all_are(at_once(exchange(rendezvous, 1, 2, 0.3)), RendezvousError, hint)
    all_are(at_once(exchange(rendezvous, 0, 2, 0.3)), RendezvousError, hint)


@pytest.mark.usefixtures("long_refusal")
def test_ranks_with_different_sizes_are_refused(rendezvous: str) -> None:
    outcomes = at_once(
        exchange(rendezvous, 0, 3), exchange(rendezvous, 1, 3), exchange(rendezvous, 2, 4)
    )
    all_are(outcomes, RendezvousError, "rank 2 expects 4 ranks, rank 0 expects 3")


@pytest.mark.usefixtures("long_refusal")
def test_a_rank_just_after_a_disagreement_is_told(rendezvous: str) -> None:
    def late() -> object:
        time.sleep(0.2)
        return exchange(rendezvous, 1, 3)()

    outcomes = at_once(exchange(rendezvous, 0, 3), exchange(rendezvous, 2, 4), late)
    all_are(outcomes, RendezvousError, "rank 2 expects 4 ranks, rank 0 expects 3")


@pytest.mark.usefixtures("long_refusal")
def test_a_late_rank_is_told_after_another_refused_rank_has_gone(rendezvous: str) -> None:
    refused = threading.Event()

    def early() -> object:
        try:
            return exchange(rendezvous, 1, 4)()
        finally:
            refused.set()

    def wrong() -> object:
        time.sleep(0.2)  # until then, rank 1 is admitted
        return exchange(rendezvous, 2, 5)()

    def late() -> object:
        assert refused.wait(PATIENCE_S)
        time.sleep(0.2)  # until then, rank 0 notices that rank 1 has disconnected
        return exchange(rendezvous, 3, 4, 3)()

    outcomes = at_once(exchange(rendezvous, 0, 4), early, wrong, late)
    all_are(outcomes, RendezvousError, "rank 2 expects 5 ranks, rank 0 expects 4")


def test_a_rank_lost_at_the_end_is_reported_to_the_others(rendezvous: str) -> None:
    """Loses rank 2 after rank 1 has received all texts and before rank 3 has answered."""
    received: list[bytes] = []

    def others() -> None:
        with caller(rendezvous) as last:
            with caller(rendezvous) as first, caller(rendezvous) as lost:
                for rank, connection in enumerate((first, lost, last), 1):
                    connection.sendall(hello(rendezvous, rank=rank, size=4, text_bytes=0))
                kinds = tcp_store_frames.ADMITTED + tcp_store_frames.ALL
                read_kinds(first, len(kinds), kinds)
                first.sendall(tcp_store_frames.ADMITTED)
                first.close()
                time.sleep(0.2)  # until then, rank 0 notices that rank 1 has disconnected
            received.append(read_kinds(last, 3))

    outcomes = at_once(exchange(rendezvous, 0, 4), others)
    all_are(outcomes[:1], RendezvousError, "rank 2 (127.0.0.1 port")
    assert received == [tcp_store_frames.ADMITTED + tcp_store_frames.ALL + tcp_store_frames.REFUSED]


def read_kinds(connection: socket.socket, count: int, expected: bytes | None = None) -> bytes:
    """Returns the kinds of the next `count` messages of rank 0; fewer if the connection ends."""
    kinds = b""
    with connection.makefile("rb") as stream:
        while len(kinds) < count and (head := stream.read(tcp_store_frames.FRAME.size)):
            kind, length = tcp_store_frames.FRAME.unpack(head)
            stream.read(length)
            kinds += kind
    assert expected in (None, kinds)
    return kinds


def test_two_claims_to_one_rank_are_refused(rendezvous: str) -> None:
    outcomes = at_once(
        exchange(rendezvous, 0, 3), exchange(rendezvous, 1, 3), exchange(rendezvous, 1, 3)
    )
    all_are(outcomes, RendezvousError, "two processes claim to be rank 1 of 3 (127.0.0.1 port")


@pytest.mark.usefixtures("short_patience")
def test_two_claims_to_rank_0_are_refused(rendezvous: str) -> None:
    refused = threading.Event()

    def lead() -> Any:
        try:
            return exchange(rendezvous, 0, 2)()
        finally:
            refused.set()

    def follow() -> Any:
        assert refused.wait(20)  # until then, the other rank 0 listens
        return exchange(rendezvous, 1, 2)()

    outcomes = at_once(lead, lead, follow)
    all_are(
        [one for one in outcomes if one != texts(2)],
        RendezvousError,
        "cannot listen there: Address already in use",
    )
    assert outcomes.count(texts(2)) == 2


def test_a_rank_killed_while_it_waits_is_named(rendezvous: str) -> None:
    program = f"""
from unisono.bootstrap.tcp_store import TcpStore
print("begun", flush=True)
TcpStore({rendezvous!r}, None).exchange(1, 3, b"", 60)
"""

    def killed() -> None:
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline()
            time.sleep(0.3)
            process.kill()

    outcomes = at_once(exchange(rendezvous, 0, 3, 60), killed)
    all_are(outcomes[:1], RendezvousError, "rank 1 (127.0.0.1 port")
    assert "was lost during the bootstrap" in str(outcomes[0])


def test_a_lost_rank_0_is_named(rendezvous: str) -> None:
    port = tcp_address.parse(rendezvous).port

    def leader_that_dies() -> None:
        with socket.create_server(("127.0.0.1", port)) as listener:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(tcp_store_frames.frame(tcp_store_frames.ADMITTED))
                time.sleep(0.1)

    outcomes = at_once(exchange(rendezvous, 1, 2, 60), leader_that_dies)
    all_are(outcomes[:1], RendezvousError, "rank 0 was lost during the bootstrap")


# ---- invalid addresses


@pytest.mark.parametrize(
    "text", ["tcp://", "tcp://host", "tcp://:29400", "tcp://host:0", "tcp://host:99999",
             "tcp://[fd00::1:29400", "tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://host:port"]
)  # fmt: skip
def test_invalid_addresses_are_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match=r"tcp://HOST:PORT|need the address of rank 0"):
        TcpStore(text, None)


def test_an_address_of_another_host_than_rank_0_is_refused() -> None:
    started = time.monotonic()
    with pytest.raises(RendezvousError, match=r"rank 0 must listen there.*lo \(127\.0\.0\.1\)"):
        exchange("tcp://192.0.2.77:29400", 0, 2, 60)()
    assert time.monotonic() - started < limit_s(1)


def test_a_host_name_of_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_on_debian(host: str, port: int, type: int) -> list[Any]:
        return [(socket.AF_INET, type, 6, "", ("127.0.1.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", as_on_debian)
    for rank in (0, 1):
        with pytest.raises(RendezvousError, match=r"node7 means 127\.0\.1\.1.*/etc/hosts, or set"):
            exchange("tcp://node7:29400", rank, 2)()


@pytest.mark.usefixtures("short_patience")
def test_an_unknown_host_name_is_reported() -> None:
    with pytest.raises(RendezvousError, match="rank 0 cannot listen there: "):
        exchange("tcp://no-such-host.invalid:29400", 0, 2)()
    with pytest.raises(RendezvousError, match="rank 0 did not listen: timeout after"):
        exchange("tcp://no-such-host.invalid:29400", 1, 2, 0.3)()


# ---- processes that are not ranks


def greeting() -> bytes:
    return Handshake(SECRET, dialing=True, purpose=tcp_store_frames.PURPOSE).opening


def hello(job: str, **changes: int) -> bytes:
    facts = {"rank": 1, "size": 2, "text_bytes": 9} | changes
    return Hello(job=tcp_address.parse(job).digest(), **facts).pack()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_strangers_do_no_harm(
    rendezvous: str, secret: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    gone = threading.Event()
    silent: list[socket.socket] = []

    def strangers() -> None:
        for data in (
            b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 40, b"\xff" * 4096, greeting(),
            greeting()[:7], greeting() + bytes(32), hello("tcp://another:1"),
            hello(rendezvous)[:30], hello(rendezvous, text_bytes=(1 << 20) + 1),
            b"unimeet2" + hello(rendezvous)[8:],
        ):  # fmt: skip
            with caller(rendezvous) as connection, contextlib.suppress(OSError):
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1000):
                    pass
        for _ in range(20):  # connections of a port scan that stay open
            with contextlib.ExitStack() as kept:
                silent.append(kept.enter_context(caller(rendezvous)))
                kept.pop_all()
        gone.set()

    def second() -> Any:
        assert gone.wait(30)
        return exchange(rendezvous, 1, 2, secret=secret)()

    outcomes = at_once(exchange(rendezvous, 0, 2, secret=secret), second, strangers)
    for connection in silent:
        connection.close()
    assert outcomes[:2] == [texts(2)] * 2, outcomes
    assert caplog.text.count("rejected a connection") == 1


def test_a_stranger_with_a_byte_a_second_is_rejected(
    rendezvous: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_store_server, "_HELLO_TIMEOUT_S", 0.4)
    data = hello(rendezvous)

    def slow() -> None:
        with caller(rendezvous) as connection, contextlib.suppress(ConnectionError):
            for byte in data:
                connection.sendall(bytes([byte]))
                time.sleep(0.1)

    def second() -> Any:
        time.sleep(1.0)
        return exchange(rendezvous, 1, 2)()

    assert at_once(exchange(rendezvous, 0, 2), second, slow)[:2] == [texts(2)] * 2
    assert "did not identify itself within 0.4 s" in caplog.text


def test_the_oldest_of_too_many_strangers_is_closed(
    rendezvous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_store_server, "_MOST_PENDING", 5)

    def second() -> Any:
        with contextlib.ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(caller(rendezvous))
            return exchange(rendezvous, 1, 2)()

    assert at_once(exchange(rendezvous, 0, 2), second) == [texts(2)] * 2


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize(
    ("first", "second"), [(SECRET, b"another"), (SECRET, None), (None, SECRET)]
)
def test_ranks_with_different_secrets_are_refused(
    rendezvous: str, first: bytes | None, second: bytes | None
) -> None:
    def follow() -> Any:
        outcomes = at_once(exchange(rendezvous, 1, 2, secret=second))
        all_are(outcomes, AuthenticationError, "the same job secret?")
        return exchange(rendezvous, 1, 2, secret=first)()  # rank 0 has waited for the right rank 1

    assert at_once(exchange(rendezvous, 0, 2, secret=first), follow) == [texts(2)] * 2


def test_another_secret_is_reported_soon_and_at_last_on_rank_0(rendezvous: str) -> None:
    begun = time.monotonic()
    told = []

    def second() -> Any:
        try:
            return exchange(rendezvous, 1, 2, 30, b"another")()
        finally:
            told.append(time.monotonic() - begun)

    outcomes = at_once(exchange(rendezvous, 0, 2, 4, SECRET), second)
    all_are(outcomes[1:], AuthenticationError, "the same job secret?")
    assert told[0] < limit_s(2)
    all_are(outcomes[:1], RendezvousError, "rejected connection came from 127.0.0.1 port")


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(100), b"A"])
@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_listener_that_is_not_a_rank_is_refused(
    rendezvous: str, answer: bytes, secret: bytes | None
) -> None:
    done = threading.Event()

    def impostor() -> None:
        with socket.create_server(("127.0.0.1", tcp_address.parse(rendezvous).port)) as listener:
            listener.settimeout(0.1)
            while not done.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.recv(1000)
                        connection.sendall(answer)

    def rank() -> Any:
        try:
            return exchange(rendezvous, 1, 2, 5, secret)()
        finally:
            done.set()

    outcomes = at_once(rank, impostor)
    all_are(outcomes[:1], AuthenticationError, "was not admitted")


@given(st.lists(st.binary(max_size=50), max_size=6))
def test_texts_survive_packing(brought: list[bytes]) -> None:
    packed = tcp_store_frames.pack_texts(brought)
    assert tcp_store_frames.unpack_texts(packed) == brought
    with pytest.raises(RendezvousError):
        tcp_store_frames.unpack_texts(packed[:-1])


@given(st.binary(max_size=64))
def test_any_bytes_are_unpacked_or_refused(data: bytes) -> None:
    with contextlib.suppress(RendezvousError):
        assert tcp_store_frames.pack_texts(tcp_store_frames.unpack_texts(data)) == data
    with contextlib.suppress(AuthenticationError):
        Hello.unpack(
            data.ljust(tcp_store_frames.HELLO_BYTES, b"\0")[: tcp_store_frames.HELLO_BYTES]
        )
