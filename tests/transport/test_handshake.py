"""The handshake authenticates both ends only if both know the secret, for any received bytes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from time_limits import limit_s
from unisono.errors import AuthenticationError
from unisono.transport.handshake import Handshake, authenticate

SECRET = b"the secret of this job"

Change = Callable[[int, bytes], bytes]


def run_both(
    dialer: Handshake, listener: Handshake, change: Change = lambda _, m: m
) -> list[bytes]:
    """Runs a handshake between both ends; `change` may alter each of the messages 0 to 3. Returns
    the messages.
    """
    sent = [change(0, dialer.opening)]
    for number, end in ((1, listener), (2, dialer), (3, listener)):
        sent.append(change(number, end.take(sent[-1])))
    assert dialer.take(sent[-1]) == b""
    return sent


def pair(
    dialing_secret: bytes = SECRET, listening_secret: bytes = SECRET, purpose: bytes = b"test"
) -> tuple[Handshake, Handshake]:
    return (
        Handshake(dialing_secret, dialing=True, purpose=b"test"),
        Handshake(listening_secret, dialing=False, purpose=purpose),
    )


@given(st.binary(min_size=1), st.binary())
def test_equal_secrets_are_authenticated(secret: bytes, purpose: bytes) -> None:
    dialer = Handshake(secret, dialing=True, purpose=purpose)
    listener = Handshake(secret, dialing=False, purpose=purpose)
    assert [len(m) for m in run_both(dialer, listener)] == [40, 40, 32, 32]
    assert dialer.key == listener.key
    assert dialer.wanted_bytes == listener.wanted_bytes == 0


def test_every_connection_has_a_key_of_its_own() -> None:
    keys = set()
    for _ in range(20):
        ends = pair()
        run_both(*ends)
        keys.add(ends[0].key)
    assert len(keys) == 20


@given(st.binary(min_size=1), st.binary(min_size=1))
def test_another_secret_is_refused(one: bytes, other: bytes) -> None:
    # HMAC pads keys of up to 64 bytes with zeros, and hashes longer ones (RFC 2104).
    if one.rstrip(b"\0") == other.rstrip(b"\0"):
        return
    with pytest.raises(AuthenticationError, match="does not know the job's secret"):
        run_both(*pair(one, other))


def test_another_purpose_is_refused() -> None:
    with pytest.raises(AuthenticationError):
        run_both(*pair(purpose=b"tes"))


@pytest.mark.parametrize(
    ("message", "byte"), [(m, b) for m, n in enumerate((40, 40, 32, 32)) for b in range(n)]
)
def test_every_changed_bit_is_refused(message: int, byte: int) -> None:
    for bit in range(8):

        def flip(number: int, data: bytes, bit: int = bit) -> bytes:
            if number != message:
                return data
            return data[:byte] + bytes([data[byte] ^ 1 << bit]) + data[byte + 1 :]

        dialer, listener = pair()
        with pytest.raises(AuthenticationError):
            run_both(dialer, listener, flip)
        with pytest.raises(AuthenticationError, match="not authenticated yet"):
            assert dialer.key


def test_a_recording_proves_nothing_to_either_end() -> None:
    recorded = run_both(*pair())
    listener = Handshake(SECRET, dialing=False, purpose=b"test")
    listener.take(recorded[0])
    with pytest.raises(AuthenticationError):
        listener.take(recorded[2])
    dialer = Handshake(SECRET, dialing=True, purpose=b"test")
    dialer.take(recorded[1])
    with pytest.raises(AuthenticationError):
        dialer.take(recorded[3])


def test_reflected_messages_are_refused() -> None:
    dialer, _ = pair()
    with pytest.raises(AuthenticationError, match="sends our own messages back"):
        dialer.take(dialer.opening)
    # Here the greetings differ. Only the role in a proof shows that the dialer gets its own proof.
    dialer, listener = pair()
    proof = dialer.take(listener.take(dialer.opening))
    with pytest.raises(AuthenticationError):
        dialer.take(proof)


def test_proofs_of_one_dialer_cannot_open_two_listeners() -> None:
    dialer, first = pair()
    _, second = pair()
    second.take(dialer.opening)
    proof = dialer.take(first.take(dialer.opening))
    with pytest.raises(AuthenticationError):
        second.take(proof)


@given(st.binary(max_size=64))
def test_messages_of_any_other_length_are_refused(data: bytes) -> None:
    _, listener = pair()
    if len(data) != listener.wanted_bytes:
        with pytest.raises(ValueError, match="expected 40"):
            listener.take(data)


@given(st.booleans(), st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_random_bytes_are_not_a_proof(dialing: bool, nonce: bytes, proof: bytes) -> None:
    end = Handshake(SECRET, dialing=dialing, purpose=b"test")
    end.take(b"unisono1" + nonce)
    with pytest.raises(AuthenticationError, match="does not know"):
        end.take(proof)
    with pytest.raises(AuthenticationError, match="is not authenticated"):
        _ = end.key


@given(st.integers(0, 3), st.integers(0, 39), st.integers(1, 255))
def test_no_byte_of_a_handshake_can_be_changed(number: int, at: int, by: int) -> None:
    def change(message: int, data: bytes) -> bytes:
        if message != number:
            return data
        place = at % len(data)
        return data[:place] + bytes([data[place] ^ by]) + data[place + 1 :]

    with pytest.raises(AuthenticationError):
        run_both(*pair(), change)


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="empty secret"):
        Handshake(b"", dialing=True, purpose=b"")


# ---- over sockets


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def authenticate_end(
    sock: socket.socket, *, dialing: bool, secret: bytes = SECRET, in_s: float = 5
) -> bytes:
    deadline = time.monotonic() + in_s
    return authenticate(sock, secret, dialing=dialing, purpose=b"test", deadline=deadline)


def test_both_ends_of_a_socket_are_authenticated(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    one.settimeout(7)
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(authenticate_end, other, dialing=False)
        here = authenticate_end(one, dialing=True)
        assert here == there.result()
    assert (one.gettimeout(), other.gettimeout()) == (7, None)
    one.sendall(b"what follows")  # data after the handshake, which the handshake must not read
    assert other.recv(64) == b"what follows"


@pytest.mark.parametrize("wrong", ["dialer", "listener"])
def test_a_wrong_secret_over_a_socket_is_refused(
    ends: tuple[socket.socket, socket.socket], wrong: str
) -> None:
    def end(sock: socket.socket, name: str) -> None:
        with sock, pytest.raises(AuthenticationError):
            authenticate_end(
                sock, dialing=name == "dialer", secret=b"wrong" if name == wrong else SECRET
            )

    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(end, ends[1], "listener")
        end(ends[0], "dialer")
        there.result()


@pytest.mark.parametrize("dialing", [True, False])
def test_a_silent_peer_times_out(ends: tuple[socket.socket, socket.socket], dialing: bool) -> None:
    begun = time.monotonic()
    with pytest.raises(AuthenticationError, match="in time"):
        authenticate_end(ends[0], dialing=dialing, in_s=0.2)
    assert time.monotonic() - begun < limit_s(1)


@pytest.mark.parametrize("dialing", [True, False])
def test_a_byte_now_and_then_gains_no_time(
    ends: tuple[socket.socket, socket.socket], dialing: bool
) -> None:
    greeting = b"unisono1" + bytes(32)

    def send_slowly(sock: socket.socket) -> int:
        """Sends a byte every 0.25 s, and the greeting in 10 s. Returns the number of bytes sent."""
        for sent, byte in enumerate(greeting):
            time.sleep(0.25)
            try:
                sock.sendall(bytes([byte]))
            except OSError:
                return sent
        return len(greeting)

    with ThreadPoolExecutor(1) as pool:
        dripping = pool.submit(send_slowly, ends[1])
        with pytest.raises(AuthenticationError, match="in time"):
            authenticate_end(ends[0], dialing=dialing, in_s=0.3)
        ends[0].close()
        assert dripping.result() < len(greeting)


@pytest.mark.parametrize("said", [b"", b"unisono1", b"GET / HTTP/1.1\r\n" * 8, bytes(1000)])
@pytest.mark.parametrize("dialing", [True, False])
def test_strangers_are_refused(
    ends: tuple[socket.socket, socket.socket], dialing: bool, said: bytes
) -> None:
    ends[1].sendall(said)
    ends[1].shutdown(socket.SHUT_WR)
    with pytest.raises(AuthenticationError):
        authenticate_end(ends[0], dialing=dialing)
