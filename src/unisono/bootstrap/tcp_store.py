"""Bootstrap through TCP: rank 0 listens at `tcp://host:port`, and the other ranks connect.

With a secret, both ends of every connection first prove that they know it (`transport.handshake`).
Then

    rank   -> rank 0   hello: magic, digest of the rendezvous, rank, size; the rank's text
    rank 0 -> rank     ADMITTED, at once
    rank 0 -> rank     ALL with the texts of all ranks, or REFUSED with the reason
    rank   -> rank 0   ADMITTED: the rank has all texts

Until a rank is admitted, it retries after every error, because rank 0 may start last and another
job may use the port before. After that, a connection that ends means a lost rank.
"""

from __future__ import annotations

import random
import socket
import time
from dataclasses import dataclass

from unisono.bootstrap import tcp_store_frames
from unisono.bootstrap.tcp_address import PATIENCE_S, dial, keep_alive, listen, parse, resolve
from unisono.bootstrap.tcp_store_frames import FRAME, Hello
from unisono.bootstrap.tcp_store_server import TcpStoreServer
from unisono.errors import AuthenticationError, RendezvousError
from unisono.transport import CLEAR, Connection, ProofRefusedError, Security, authenticate

_ATTEMPT_S = 10.0
_VERDICT_S = 1.0
_LONGEST_PAUSE_S = 0.1
_REFUSED_S = 1.0
"""Seconds for which a rank retries after its proof was refused. Another job may use this port at
the moment, or rank 0 may reject clients because too many unknown clients connect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    """Consecutive refusals by the process that listens at the rendezvous. If `proof`, that
    process refused this rank's proof, else it closed the connection. At the time `until`, this rank
    stops trying.
    """

    proof: bool
    until: float

    @classmethod
    def after(cls, before: _Refused | None, error: Exception, now: float) -> _Refused:
        proof = isinstance(error, ProofRefusedError)
        if before is not None and before.proof == proof:
            return before
        return cls(proof=proof, until=now + (min(PATIENCE_S, _REFUSED_S) if proof else PATIENCE_S))


class TcpStore:
    """A `BootstrapStore` at `tcp://host:port`, with a secret if given, and TLS if `security`
    requires it.

    Raises `ValueError` if `rendezvous` is not such an address.
    """

    def __init__(self, rendezvous: str, secret: bytes | None, security: Security = CLEAR) -> None:
        self._address = parse(rendezvous)
        self._secret = secret
        self._handshake_secret = security.bootstrap_secret(secret)
        self._security = security

    @property
    def secret(self) -> bytes | None:
        """Secret that both ends of each connection prove to know. None: no proof is needed."""
        return self._secret

    def exchange(self, rank: int, size: int, mine: bytes, timeout_s: float) -> list[bytes]:
        """Returns the texts of all ranks, by rank.

        >>> TcpStore("tcp://127.0.0.1:29400", None).exchange(0, 1, b"alone", 1.0)
        [b'alone']
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size}: expected a rank from 0 to size-1")
        if len(mine) > tcp_store_frames.MOST_TEXT_BYTES:
            raise ValueError(
                f"a text of {len(mine)} bytes: at most {tcp_store_frames.MOST_TEXT_BYTES} per rank"
            )
        deadline = time.monotonic() + timeout_s
        if size == 1:
            return [mine]
        if rank == 0:
            return self._lead(size, mine, deadline, timeout_s)
        hello = Hello(job=self._address.digest(), rank=rank, size=size, text_bytes=len(mine))
        return self._follow(hello, mine, deadline, timeout_s)

    def _lead(self, size: int, mine: bytes, deadline: float, timeout_s: float) -> list[bytes]:
        listeners = listen(self._address, size + 64, deadline)
        server = TcpStoreServer(
            listeners,
            self._address,
            self._handshake_secret,
            self._security,
            size=size,
            deadline=deadline,
        )
        try:
            return server.exchange(mine, timeout_s)
        finally:
            server.close()

    def _follow(self, hello: Hello, mine: bytes, deadline: float, timeout_s: float) -> list[bytes]:
        """Retries until rank 0 admits this rank or the timeout passes, then waits for the texts."""
        who = f"{self._address.text}: rank {hello.rank} of {hello.size}"
        refused: _Refused | None = None
        pause_s = 0.005
        while True:
            connected = False
            try:
                with self._dial(deadline) as leader:
                    connected = True
                    self._introduce(leader, hello, mine, deadline)
                    return self._receive_result(leader, who, hello.size, deadline, timeout_s)
            except (OSError, AuthenticationError) as error:
                now = time.monotonic()
                refused = _Refused.after(refused, error, now) if connected else None
                if refused is not None and now > min(refused.until, deadline):
                    raise AuthenticationError(
                        f"{who} was not admitted: {error} (does another program listen there? do "
                        "all ranks have the same rendezvous, UNISONO_TLS and the same job secret?)"
                    ) from error
                if now > deadline:
                    raise RendezvousError(
                        f"{who}: rank 0 did not listen: timeout after {timeout_s:g} s: {error}; "
                        "is the address of its host right, and does a firewall block the port?"
                        + self._address.warning()
                    ) from error
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def _dial(self, deadline: float) -> Connection:
        left_s = max(deadline - time.monotonic(), 0.05)
        leader = Connection.of(dial(resolve(self._address), min(left_s, _ATTEMPT_S)))
        keep_alive(leader)
        return leader

    def _introduce(self, leader: socket.socket, hello: Hello, mine: bytes, deadline: float) -> None:
        """Identifies this rank to rank 0, and returns when rank 0 has admitted this rank. Raises
        `OSError`, `AuthenticationError`.
        """
        until = max(min(deadline, time.monotonic() + _ATTEMPT_S), time.monotonic() + _VERDICT_S)
        if self._handshake_secret is not None:
            authenticate(
                leader,
                self._handshake_secret,
                dialing=True,
                purpose=tcp_store_frames.PURPOSE,
                deadline=until,
                security=self._security,
            )
        leader.settimeout(max(until - time.monotonic(), 1e-3))
        leader.sendall(hello.pack() + mine)
        kind, payload = _receive_frame(leader, until)
        if kind == tcp_store_frames.REFUSED:
            raise RendezvousError(payload.decode(errors="replace"))
        if kind != tcp_store_frames.ADMITTED:
            raise AuthenticationError("the listener is not a unisono rank 0")

    def _receive_result(
        self, leader: socket.socket, who: str, size: int, deadline: float, timeout_s: float
    ) -> list[bytes]:
        """Returns the texts from rank 0. Waits a moment longer than the timeout: if rank 0 has
        started later than this rank, rank 0's timeout also ends later."""
        try:
            kind, payload = _receive_frame(leader, deadline + _VERDICT_S)
            if kind == tcp_store_frames.ALL:
                leader.sendall(tcp_store_frames.ADMITTED)
        except TimeoutError:
            raise RendezvousError(
                f"{who}: not all ranks came: timeout after {timeout_s:g} s"
            ) from None
        except OSError as error:
            raise RendezvousError(f"{who}: rank 0 was lost during the bootstrap") from error
        if kind == tcp_store_frames.REFUSED:
            raise RendezvousError(payload.decode(errors="replace"))
        texts = tcp_store_frames.unpack_texts(payload) if kind == tcp_store_frames.ALL else []
        if len(texts) != size:
            raise RendezvousError(f"{who}: rank 0 sent {len(texts)} texts, expected {size}")
        return texts


def _receive_frame(leader: socket.socket, deadline: float) -> tuple[bytes, bytes]:
    kind, length = FRAME.unpack(_receive(leader, FRAME.size, deadline))
    if length > tcp_store_frames.MOST_FRAME_BYTES:
        raise AuthenticationError("the listener is not a unisono rank 0")
    return kind, _receive(leader, length, deadline)


def _receive(leader: socket.socket, length: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < length:
        leader.settimeout(max(deadline - time.monotonic(), 1e-3))
        more = leader.recv(min(length - len(data), 1 << 20))
        if not more:
            raise ConnectionResetError("the connection was closed")
        data += more
    return bytes(data)
