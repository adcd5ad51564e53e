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
path between the hosts and can change packets.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import Iterator
from hashlib import sha256

from unisono.errors import AuthenticationError

NONCE_BYTES = 32
PROOF_BYTES = 32
_MAGIC = b"unisono1"
_GREETING_BYTES = len(_MAGIC) + NONCE_BYTES


class ProofRefusedError(AuthenticationError):
    """The other end is a rank, and hung up on this end's proof: its secret is another one."""


class Handshake:
    """The steps of one end, without a socket: bytes in, bytes out.

    Send `opening`; then, while `wanted_bytes` is not 0, pass exactly so many bytes to `take`, and
    send what it returns. `key` is then a key that only the two ends know. Raises
    `AuthenticationError` from `take`, after which the connection has to be closed.

    >>> dialer = Handshake(b"secret", dialing=True, purpose=b"doc")
    >>> listener = Handshake(b"secret", dialing=False, purpose=b"doc")
    >>> proof = dialer.take(listener.take(dialer.opening))
    >>> dialer.take(listener.take(proof))
    b''
    >>> dialer.key == listener.key, dialer.wanted_bytes, listener.wanted_bytes
    (True, 0, 0)
    """

    def __init__(self, secret: bytes, *, dialing: bool, purpose: bytes) -> None:
        if not secret:
            raise ValueError("an empty secret proves nothing")
        self._secret = secret
        self._dialing = dialing
        self._purpose = sha256(purpose).digest()
        self._own_nonce = secrets.token_bytes(NONCE_BYTES)
        self._peer_nonce = b""
        self._key = b""
        self.wanted_bytes = _GREETING_BYTES
        self.opening = _MAGIC + self._own_nonce if dialing else b""

    @property
    def key(self) -> bytes:
        """32 bytes that both ends have, and nobody else. Only when `wanted_bytes` is 0."""
        if not self._key:
            raise AuthenticationError("the other end has not proved itself yet")
        return self._key

    @property
    def greeted(self) -> bool:
        """Whether the other end has greeted as a rank does; a dialer has sent its proof then."""
        return bool(self._peer_nonce)

    def take(self, message: bytes) -> bytes:
        """Takes the next message, of `wanted_bytes`; returns what to send, maybe nothing."""
        if self._key or len(message) != self.wanted_bytes:
            raise ValueError(f"{len(message)} bytes, expected {self.wanted_bytes}")
        if not self._peer_nonce:
            return self._take_greeting(message)
        if not hmac.compare_digest(message, self._proof(not self._dialing)):
            raise AuthenticationError("the other end does not know the job's secret")
        self._key = self._mac(b"session")
        self.wanted_bytes = 0
        return b"" if self._dialing else self._proof(False)

    def _take_greeting(self, message: bytes) -> bytes:
        magic, nonce = message[: len(_MAGIC)], message[len(_MAGIC) :]
        if magic != _MAGIC:
            raise AuthenticationError("the other end is no unisono rank of this version")
        if nonce == self._own_nonce:
            raise AuthenticationError("the other end sends back what it was sent")
        self._peer_nonce = nonce
        self.wanted_bytes = PROOF_BYTES
        return self._proof(True) if self._dialing else _MAGIC + self._own_nonce

    def _proof(self, of_dialer: bool) -> bytes:
        return self._mac(b"dialer" if of_dialer else b"listener")

    def _mac(self, role: bytes) -> bytes:
        nonces = [self._own_nonce, self._peer_nonce]
        if not self._dialing:
            nonces.reverse()
        # Every field but the first is of fixed length, and no role begins with another.
        text = b"".join([role, b"\0", self._purpose, *nonces])
        return hmac.digest(self._secret, text, "sha256")


def authenticate(
    sock: socket.socket, secret: bytes, *, dialing: bool, purpose: bytes, deadline: float
) -> bytes:
    """Proves both ends of a connected stream socket to each other; returns the session's key.

    `purpose` must be equal at both ends; `deadline` is a time of `time.monotonic`. Reads not a byte
    beyond the handshake. Raises `AuthenticationError` if the other end does not know the secret,
    is no rank, ends the connection (`ProofRefusedError`: after a greeting), or has not proved
    itself at the deadline. The caller closes the socket.

    >>> from threading import Thread
    >>> here, there = socket.socketpair()
    >>> terms = {"purpose": b"doc", "deadline": time.monotonic() + 5}
    >>> peer = Thread(target=lambda: authenticate(there, b"secret", dialing=False, **terms))
    >>> peer.start()
    >>> len(authenticate(here, b"secret", dialing=True, **terms))
    32
    >>> peer.join(); here.close(); there.close()
    """
    handshake = Handshake(secret, dialing=dialing, purpose=purpose)
    with _until(sock, handshake, deadline):
        sock.sendall(handshake.opening)
        while handshake.wanted_bytes:
            sock.sendall(handshake.take(_receive(sock, handshake.wanted_bytes, deadline)))
    return handshake.key


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
        proved = handshake.greeted and handshake._dialing
        raise (ProofRefusedError if proved else AuthenticationError)(
            "the other end closed the connection in the middle of the handshake "
            "(does every rank have the same job secret?)"
        ) from error
