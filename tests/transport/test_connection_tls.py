"""One connection that starts TLS: accepted peers, refused peers, and requirements on the
certificate files.
"""

from __future__ import annotations

import random
import secrets
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tls import Authority, needs_openssl
from unisono import config
from unisono.errors import AuthenticationError, UnisonoError, UnsupportedError
from unisono.native import TlsContext, TlsSession, load_openssl
from unisono.transport.connection import Connection
from unisono.transport.handshake import Handshake, authenticate
from unisono.transport.security import CLEAR, Security, security_of

SECRET = b"the secret of this job"
Ends = tuple[Connection, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    dialer, listener = map(Connection.of, socket.socketpair())
    with dialer, listener:
        for sock in (dialer, listener):
            sock.settimeout(20)
        yield dialer, listener


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


def by_secret() -> Security:
    return security_of(config.settings({"UNISONO_TLS": "psk"}), SECRET)


def by_files(environ: dict[str, str]) -> Security:
    return security_of(config.settings(environ), None)


def authenticate_both(
    ends: Ends, dialing: Security, listening: Security
) -> list[bytes | AuthenticationError]:
    """Returns the results of both ends of a connection, each a key or an error."""

    def end(sock: Connection, security: Security, dialer: bool) -> bytes | AuthenticationError:
        deadline = time.monotonic() + 20
        try:
            key = authenticate(sock, SECRET, dialing=dialer, purpose=b"test", deadline=deadline,
                               security=security)  # fmt: skip
        except AuthenticationError as error:
            sock.close()
            return error
        return key

    with ThreadPoolExecutor(2) as pool:
        there = pool.submit(end, ends[1], listening, False)
        here = end(ends[0], dialing, True)
        return [here, there.result()]


def require_refused(found: bytes | AuthenticationError, text: str) -> None:
    assert isinstance(found, AuthenticationError)
    assert text in str(found)


def test_texts_of_any_length_arrive_both_ways(ends: Ends) -> None:
    here, there = authenticate_both(ends, by_secret(), by_secret())
    assert isinstance(here, bytes) and here == there
    rng = random.Random(7)
    texts = [rng.randbytes(rng.choice((1, 100, 16_384, 16_385, 300_000))) for _ in range(60)]

    def send_all(sock: Connection) -> None:
        for number, text in enumerate(texts):
            sock.sendall(text)
            if number % 20 == 7:
                assert sock.tls is not None
                sock.tls.renew_key()

    def receive_all(sock: Connection) -> bytes:
        received = bytearray()
        while len(received) < sum(map(len, texts)):
            received += sock.recv(rng.choice((1, 1000, 1 << 16)))
        return bytes(received)

    with ThreadPoolExecutor(4) as pool:
        saying = [pool.submit(send_all, sock) for sock in ends]
        hearing = [pool.submit(receive_all, sock) for sock in ends]
        for done in saying:
            done.result()
        assert [one.result() for one in hearing] == [b"".join(texts)] * 2
    ends[0].close()
    assert ends[1].recv(10) == b""


def test_keys_are_new_for_every_connection() -> None:
    keys = set()
    for _ in range(2):
        dialer, listener = (
            Handshake(SECRET, dialing=dialing, purpose=b"test", tls="psk")
            for dialing in (True, False)
        )
        proof = dialer.take(listener.take(dialer.opening))
        dialer.take(listener.take(proof))
        assert dialer.tls_key == listener.tls_key
        keys.add(dialer.tls_key)
        assert dialer.wants_channel and listener.wants_channel and not dialer.done
    assert len(keys) == 2


def test_a_relaying_attacker_is_detected() -> None:
    """Tests that both ends refuse an attacker that relays the first four messages and then has an
    encrypted channel of its own to each end.
    """
    dialer, listener = (
        Handshake(SECRET, dialing=dialing, purpose=b"test", tls="certificates")
        for dialing in (True, False)
    )
    proof = dialer.take(listener.take(dialer.opening))
    dialer.take(listener.take(proof))
    to_listener = dialer.bind(bytes(32))
    to_dialer = listener.bind(b"\1" * 32)
    for end, said in ((dialer, to_dialer), (listener, to_listener)):
        with pytest.raises(AuthenticationError):
            end.take(said)


def test_another_key_is_refused(ends: Ends) -> None:
    context = TlsContext()
    keys = [secrets.token_bytes(32), secrets.token_bytes(32)]
    one, other = (
        TlsSession(context, sock.fileno(), sock is ends[0], key)
        for sock, key in zip(ends, keys, strict=True)
    )
    with pytest.raises(AuthenticationError):
        for _ in range(4):
            one.shake()
            other.shake()


@needs_openssl
def test_a_certificate_does_not_replace_the_secret(ends: Ends, authority: Authority) -> None:
    """Tests that a peer with a valid certificate is refused if it does not have the required
    secret.
    """
    files = authority.member("somebody")
    with_files = TlsContext(
        *(files[f"UNISONO_TLS_{what}"] for what in ("CERTIFICATE", "KEY", "CA"))
    )
    dialer = TlsSession(TlsContext(), ends[0].fileno(), True, bytes(32))
    listener = TlsSession(with_files, ends[1].fileno(), False, bytes(32))
    with pytest.raises(AuthenticationError):
        for _ in range(4):
            dialer.shake()
            listener.shake()


@pytest.mark.parametrize("dialing", [True, False])
def test_different_protections_are_refused(ends: Ends, dialing: bool) -> None:
    both = (by_secret(), CLEAR) if dialing else (CLEAR, by_secret())
    here, there = authenticate_both(ends, *both)
    names = ("psk", "off") if dialing else ("off", "psk")
    require_refused(here, f"UNISONO_TLS is {names[0]} here, {names[1]} at the other end")
    assert isinstance(there, AuthenticationError)


@needs_openssl
def test_members_of_one_authority_are_authenticated(ends: Ends, authority: Authority) -> None:
    here, there = authenticate_both(
        ends, *(by_files(authority.member(name)) for name in ("one", "two"))
    )
    assert isinstance(here, bytes) and here == there


@needs_openssl
@pytest.mark.parametrize("dialing", [True, False])
def test_an_expired_certificate_is_refused(ends: Ends, authority: Authority, dialing: bool) -> None:
    both = [by_files(authority.member("late", expired=True)), by_files(authority.member("good"))]
    here, there = authenticate_both(ends, *(both if dialing else reversed(both)))
    expired, judge = (here, there) if dialing else (there, here)
    require_refused(judge, "certificate has expired")
    require_refused(expired, "certificate expired")


@needs_openssl
@pytest.mark.parametrize("dialing", [True, False])
def test_another_authority_is_refused(
    ends: Ends, authority: Authority, dialing: bool, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path / "other").member("stranger")
    stranger["UNISONO_TLS_CA"] = str(authority.file)
    both = [by_files(stranger), by_files(authority.member("good"))]
    here, there = authenticate_both(ends, *(both if dialing else reversed(both)))
    unknown, judge = (here, there) if dialing else (there, here)
    require_refused(judge, "certificate is refused")
    require_refused(unknown, "unknown ca")


def test_garbage_in_place_of_tls_is_refused(ends: Ends) -> None:
    session = TlsSession(TlsContext(), ends[1].fileno(), False, bytes(32))
    assert not session.shake()
    ends[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(AuthenticationError, match="TLS: "):
        session.shake()


# ---- settings


def test_a_key_without_a_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="UNISONO_JOB_SECRET"):
        security_of(config.settings({"UNISONO_TLS": "psk"}), None)


@needs_openssl
@pytest.mark.parametrize("missing", ["CERTIFICATE", "KEY", "CA"])
def test_missing_or_wrong_files_are_refused(
    authority: Authority, missing: str, tmp_path: Path
) -> None:
    variable = f"UNISONO_TLS_{missing}"
    files = authority.member("somebody")
    with pytest.raises(ValueError, match=f"needs {variable}"):
        by_files(files | {variable: ""})
    with pytest.raises(ValueError, match=f"{variable}: cannot read"):
        by_files(files | {variable: str(tmp_path / "nothing")})
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(UnisonoError, match=variable):
        by_files(files | {variable: str(empty)})


@needs_openssl
def test_a_key_of_another_certificate_is_refused(authority: Authority) -> None:
    one, other = authority.member("one"), authority.member("other")
    with pytest.raises(UnisonoError, match="UNISONO_TLS_KEY"):
        by_files(one | {"UNISONO_TLS_KEY": other["UNISONO_TLS_KEY"]})


def test_a_missing_openssl_is_reported() -> None:
    with pytest.raises(UnsupportedError, match=r"libnowhere.so.*install OpenSSL 3"):
        load_openssl("libnowhere.so.3")
    with pytest.raises(UnsupportedError, match=r"needs \w+, which libc.so.6 .* does not have"):
        load_openssl("libc.so.6")
    load_openssl("libssl.so.3")
