"""Both ends of a connection prove that they know the job's secret, before either believes a byte.

Four messages of fixed length, so that nothing is read whose length came from the wire:

    dialer   -> listener   magic, nonce of the dialer
    listener -> dialer     magic, nonce of the listener
    dialer   -> listener   HMAC(secret, "dialer",   purpose, both nonces)
    listener -> dialer     HMAC(secret, "listener", purpose, both nonces)

Both nonces are new for every connection, so an old recording proves nothing; the roles differ, so
what one end says cannot be sent back to it; the purpose binds the proof to one use of the secret.
The dialer proves itself first, so a scan of the ports brings no proof to guess secrets against.
This is the challenge and response of CHAP (RFC 1994) in both directions, with HMAC-SHA256 (RFC
2104) and the roles and nonces bound as in ISO/IEC 9798-4, mechanism 4 (mutual, three pass).

It proves who connected. It does not protect the bytes that follow from somebody who sits on the
path between the hosts and can change packets. TLS does: it begins after the fourth message, and
both ends prove once more, inside of it, that they know the secret, over the number of that very
channel (RFC 5705, as RFC 9266 has it). So nobody who relays the first four messages stands between
the ends.
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
    """The other end is a rank, and hung up on this end's proof: its secret is another one."""


class Handshake:
    """The steps of one end, without a socket: bytes in, bytes out.

    Send `opening`; then, while `wanted_bytes` is not 0, pass exactly so many bytes to `take`, and
    send what it returns. If it then `wants_channel`, turn to TLS, send what `bind` returns, and go
    on. `key` is in the end a key that only the two ends know. Raises `AuthenticationError` from
    `take`, after which the connection has to be closed.

    `tls`, one of the values of UNISONO_TLS, is what both ends have to be set to.

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
        self.objection = ""
        """What is wrong with the greeting of the other end. It was answered all the same, for the
        other end to tell its user."""
        self.opening = self._greeting if dialing else b""

    @property
    def key(self) -> bytes:
        """32 bytes that both ends have, and nobody else. Only when it is `done`."""
        if not self.done:
            raise AuthenticationError("the other end has not proved itself yet")
        return self._mac(b"session")

    @property
    def done(self) -> bool:
        """Whether both ends have proved all that they have to."""
        return not self.wanted_bytes and not self.wants_channel

    @property
    def tls_key(self) -> bytes:
        """32 bytes for TLS, new for every connection: HKDF-SHA256 of the secret and both nonces."""
        return hkdf(self._secret, b"".join(self._nonces), _TLS_KEY + self._purpose)

    @property
    def greeted(self) -> bool:
        """Whether the other end has greeted as a rank does; a dialer has sent its proof then."""
        return bool(self._peer_nonce)

    def take(self, message: bytes) -> bytes:
        """Takes the next message, of `wanted_bytes`; returns what to send, maybe nothing."""
        if not self.wanted_bytes or len(message) != self.wanted_bytes:
            raise ValueError(f"{len(message)} bytes, expected {self.wanted_bytes}")
        if not self._peer_nonce:
            return self._take_greeting(message)
        if self.objection:
            raise AuthenticationError(self.objection)
        if not hmac.compare_digest(message, self._proof(not self.dialing)):
            raise AuthenticationError("the other end does not know the job's secret")
        self.wanted_bytes = 0
        if self._channel:
            return b""
        self.wants_channel = self._tls != "off"
        return b"" if self.dialing else self._proof(False)

    def bind(self, channel: bytes) -> bytes:
        """Both ends speak inside a channel from here on, of which `channel` is the number; returns
        what to send."""
        self._channel = channel
        self.wants_channel = False
        self.wanted_bytes = PROOF_BYTES
        return self._proof(self.dialing)

    def _take_greeting(self, message: bytes) -> bytes:
        magic, nonce = message[:_MAGIC_BYTES], message[_MAGIC_BYTES:]
        theirs = next((tls for tls, known in _MAGICS.items() if known == magic), None)
        if theirs is None:
            raise AuthenticationError("the other end is no unisono rank of this version")
        if nonce == self._own_nonce:
            raise AuthenticationError("the other end sends back what it was sent")
        if theirs != self._tls:
            self.objection = (
                f"UNISONO_TLS is {self._tls} here, {theirs} at the other end: "
                "give all ranks the same"
            )
            if self.dialing:
                raise AuthenticationError(self.objection)
        self._peer_nonce = nonce
        self.wanted_bytes = PROOF_BYTES
        return self._proof(True) if self.dialing else self._greeting

    @property
    def _greeting(self) -> bytes:
        return _MAGICS[self._tls] + self._own_nonce

    @property
    def _nonces(self) -> tuple[bytes, bytes]:
        """The dialer's, the listener's."""
        own, peer = self._own_nonce, self._peer_nonce
        return (own, peer) if self.dialing else (peer, own)

    def _proof(self, of_dialer: bool) -> bytes:
        return self._mac(b"dialer" if of_dialer else b"listener")

    def _mac(self, role: bytes) -> bytes:
        # Every field but the first is of fixed length, and no role begins with another.
        text = b"".join([role, b"\0", self._purpose, *self._nonces, self._channel])
        return hmac.digest(self._secret, text, "sha256")


def hkdf(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """32 bytes out of a secret, for one use: HKDF-SHA256 (RFC 5869).

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
    """Proves both ends of a connected stream socket to each other; returns the session's key.

    `purpose` must be equal at both ends; `deadline` is a time of `time.monotonic`. Reads not a byte
    beyond the handshake. Raises `AuthenticationError` if the other end does not know the secret,
    is no rank, ends the connection (`ProofRefusedError`: after a greeting), or has not proved
    itself at the deadline. The caller closes the socket, which is a `Connection` if it is to be
    turned to TLS.

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
        # Each piece gets what is left of the whole time: one byte a second wins nothing.
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
    """Sets the socket's timeout, puts it back, and says what the loss of a connection means."""
    before = sock.gettimeout()
    try:
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        yield
        sock.settimeout(before)
    except TimeoutError:
        raise AuthenticationError("the other end did not prove itself in time") from None
    except OSError as error:
        if error.errno == errno.EBADMSG:
            raise AuthenticationError(f"TLS: {error.strerror}") from error
        proved = handshake.greeted and handshake.dialing
        raise (ProofRefusedError if proved else AuthenticationError)(
            "the other end closed the connection in the middle of the handshake "
            "(does every rank have the same job secret?)"
        ) from error
