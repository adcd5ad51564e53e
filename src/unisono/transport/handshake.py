"""Mutual authentication: both ends of a connection prove that they know the job's secret.

The handshake has four messages of fixed length, so no length from the network is trusted:

    dialer   -> listener   magic, nonce of the dialer
    listener -> dialer     magic, nonce of the listener
    dialer   -> listener   HMAC(secret, "dialer",   purpose, both nonces)
    listener -> dialer     HMAC(secret, "listener", purpose, both nonces)

Both nonces are new for every connection, so a recorded handshake proves nothing. The roles differ,
so one end's proof cannot be sent back to it. The purpose binds a proof to one use of the secret.
The dialer proves itself first, so a port scan gets no proof against which to guess secrets. This is
CHAP (RFC 1994) in both directions, with HMAC-SHA256 (RFC 2104). Roles and nonces are bound as in
ISO/IEC 9798-4, mechanism 4 (mutual, three pass).

The handshake proves the identity of both ends. It does not protect later data from an attacker who
can change packets between the hosts. TLS protects this data, and begins after the fourth message.
Inside TLS, both ends prove again that they know the secret, over the channel binding (RFC 5705, as
in RFC 9266). So an attacker who relays the first four messages cannot read or change the later
ones.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import socket
import time
from collections.abc import Iterator
from hashlib import sha256

from unisono.errors import AuthenticationError
from unisono.transport.connection import Connection
from unisono.transport.security import CLEAR, Security

NONCE_BYTES = 32
PROOF_BYTES = 32
_MAGIC_BYTES = 8
_MAGICS = {"off": b"unisono1", "psk": b"unisonoP", "certificates": b"unisonoC"}
_GREETING_BYTES = _MAGIC_BYTES + NONCE_BYTES
_TLS_KEY = b"unisono tls 1.3 psk\0"


class ProofRefusedError(AuthenticationError):
    """Raised if the other end, which is a rank, closed the connection after this end's proof. So
    the two ends have different secrets.
    """


class Handshake:
    """One end's part of the handshake, without a socket: takes received bytes and returns bytes to
    send.

    Send `opening`. While `wanted_bytes` is not 0, pass exactly that many bytes to `take`, and send
    its result. If `wants_channel` is then true, start TLS, send the result of `bind`, and continue.
    After the handshake, `key` is a key that only the two ends know. Close the connection if `take`
    raises `AuthenticationError`.

    `tls` is a value of UNISONO_TLS, which must be equal at both ends.

    >>> dialer = Handshake(b"secret", dialing=True, purpose=b"doc")
    >>> listener = Handshake(b"secret", dialing=False, purpose=b"doc")
    >>> proof = dialer.take(listener.take(dialer.opening))
    >>> dialer.take(listener.take(proof))
    b''
    >>> dialer.key == listener.key, dialer.wanted_bytes, listener.wanted_bytes
    (True, 0, 0)
    """

    def __init__(self, secret: bytes, *, dialing: bool, purpose: bytes, tls: str = "off") -> None:
        if not secret:
            raise ValueError("an empty secret proves nothing")
        self._secret = secret
        self.dialing = dialing
        self._tls = tls
        self._purpose = sha256(purpose).digest()
        self._own_nonce = secrets.token_bytes(NONCE_BYTES)
        self._peer_nonce = b""
        self._channel = b""
        self.wanted_bytes = _GREETING_BYTES
        self.wants_channel = False
        self.greeting_error = ""
        """Error in the other end's greeting. The greeting is answered nevertheless, so that the
        other end can report the error to its user."""
        self.opening = self._greeting if dialing else b""

    @property
    def key(self) -> bytes:
        """32 bytes that only the two ends know. Available when the handshake is `done`."""
        if not self.done:
            raise AuthenticationError("the other end is not authenticated yet")
        return self._mac(b"session")

    @property
    def done(self) -> bool:
        """True if the handshake is complete and both ends are authenticated."""
        return not self.wanted_bytes and not self.wants_channel

    @property
    def tls_key(self) -> bytes:
        """32-byte TLS key, new for every connection: HKDF-SHA256 of the secret and both nonces."""
        return hkdf(self._secret, b"".join(self._nonces), _TLS_KEY + self._purpose)

    @property
    def greeted(self) -> bool:
        """True if the other end has sent a valid greeting. If this end is the dialer, it has sent
        its proof by then.
        """
        return bool(self._peer_nonce)

    def take(self, message: bytes) -> bytes:
        """Handles the next message, of `wanted_bytes` bytes; returns the bytes to send, possibly
        none."""
        if not self.wanted_bytes or len(message) != self.wanted_bytes:
            raise ValueError(f"a message of {len(message)} bytes, expected {self.wanted_bytes}")
        if not self._peer_nonce:
            return self._take_greeting(message)
        if self.greeting_error:
            raise AuthenticationError(self.greeting_error)
        if not hmac.compare_digest(message, self._proof(not self.dialing)):
            raise AuthenticationError("the other end does not know the job's secret")
        self.wanted_bytes = 0
        if self._channel:
            return b""
        self.wants_channel = self._tls != "off"
        return b"" if self.dialing else self._proof(False)

    def bind(self, channel: bytes) -> bytes:
        """Binds the handshake to a TLS channel; returns the bytes to send inside TLS. `channel` is
        the channel binding."""
        self._channel = channel
        self.wants_channel = False
        self.wanted_bytes = PROOF_BYTES
        return self._proof(self.dialing)

    def _take_greeting(self, message: bytes) -> bytes:
        magic, nonce = message[:_MAGIC_BYTES], message[_MAGIC_BYTES:]
        theirs = next((tls for tls, known in _MAGICS.items() if known == magic), None)
        if theirs is None:
            raise AuthenticationError("the other end is not a unisono rank of this version")
        if nonce == self._own_nonce:
            raise AuthenticationError("the other end sends our own messages back")
        if theirs != self._tls:
            self.greeting_error = (
                f"UNISONO_TLS is {self._tls} here, {theirs} at the other end: "
                "give all ranks the same"
            )
            if self.dialing:
                raise AuthenticationError(self.greeting_error)
        self._peer_nonce = nonce
        self.wanted_bytes = PROOF_BYTES
        return self._proof(True) if self.dialing else self._greeting

    @property
    def _greeting(self) -> bytes:
        return _MAGICS[self._tls] + self._own_nonce

    @property
    def _nonces(self) -> tuple[bytes, bytes]:
        """The dialer's nonce, then the listener's."""
        own, peer = self._own_nonce, self._peer_nonce
        return (own, peer) if self.dialing else (peer, own)

    def _proof(self, of_dialer: bool) -> bytes:
        return self._mac(b"dialer" if of_dialer else b"listener")

    def _mac(self, role: bytes) -> bytes:
        # Different fields give different texts: all fields but the first have fixed lengths, and no
        # role is a prefix of another.
        text = b"".join([role, b"\0", self._purpose, *self._nonces, self._channel])
        return hmac.digest(self._secret, text, "sha256")


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """Derives 32 bytes from a secret for one use: HKDF-SHA256 (RFC 5869).

    >>> hkdf(b"\\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA))).hex()[:16]
    '3cb25f25faacd57a'
    """
    return hmac.digest(hmac.digest(salt, secret, "sha256"), info + b"\1", "sha256")


def authenticate(
    sock: socket.socket,
    secret: bytes,
    *,
    dialing: bool,
    purpose: bytes,
    deadline: float,
    security: Security = CLEAR,
) -> bytes:
    """Authenticates both ends of a connected stream socket to each other; returns the session key.

    `purpose` must be equal at both ends; `deadline` is a time of `time.monotonic`. The function
    does not read beyond the handshake. The caller closes the socket, which must be a `Connection`
    if TLS is used.

    Raises `AuthenticationError` if the other end does not know the secret, is not a rank, or is not
    authenticated at the deadline. Raises the same error if the other end closes the connection;
    after a greeting, this is its subclass `ProofRefusedError`.

    >>> from threading import Thread
    >>> here, there = socket.socketpair()
    >>> terms = {"purpose": b"doc", "deadline": time.monotonic() + 5}
    >>> peer = Thread(target=lambda: authenticate(there, b"secret", dialing=False, **terms))
    >>> peer.start()
    >>> len(authenticate(here, b"secret", dialing=True, **terms))
    32
    >>> peer.join(); here.close(); there.close()
    """
    handshake = Handshake(secret, dialing=dialing, purpose=purpose, tls=security.tls)
    with _until(sock, handshake, deadline):
        sock.sendall(handshake.opening)
        while not handshake.done:
            if handshake.wants_channel:
                assert isinstance(sock, Connection)
                sock.sendall(_channel(sock, handshake, security, deadline))
            sock.sendall(handshake.take(_receive(sock, handshake.wanted_bytes, deadline)))
    return handshake.key


def _channel(sock: Connection, handshake: Handshake, security: Security, deadline: float) -> bytes:
    while True:
        try:
            key, dialing = handshake.tls_key, handshake.dialing
            return handshake.bind(sock.secure(security, dialing=dialing, key=key))
        except BlockingIOError:
            sock.await_more(deadline)


def _receive(sock: socket.socket, length: int, deadline: float) -> bytes:
    data = b""
    while len(data) < length:
        # All reads share one deadline, so an end that sends a byte a second gains no time.
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        more = sock.recv(length - len(data))
        if not more:
            raise ConnectionResetError
        data += more
        if time.monotonic() >= deadline and len(data) < length:
            raise TimeoutError
    return data


@contextlib.contextmanager
def _until(sock: socket.socket, handshake: Handshake, deadline: float) -> Iterator[None]:
    """Sets the socket's timeout inside the block, and converts the error of a lost connection."""
    before = sock.gettimeout()
    try:
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        yield
        sock.settimeout(before)
    except TimeoutError:
        raise AuthenticationError("the other end did not authenticate in time") from None
    except OSError as error:
        if error.errno == errno.EBADMSG:
            raise AuthenticationError(f"TLS: {error.strerror}") from error
        proved = handshake.greeted and handshake.dialing
        raise (ProofRefusedError if proved else AuthenticationError)(
            "the other end closed the connection during the handshake "
            "(do all ranks have the same job secret?)"
        ) from error
