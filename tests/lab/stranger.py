"""A program that is not a rank and connects to a port: `stranger.py MANNER ADDRESS PORT`.

Prints "connected", and then the bytes that it receives. The exit code is 0 if the peer closed the
connection, 3 if it was still connected after 20 s, and 4 if no process listened.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import sys
import time

PATIENCE_S = 20.0
NO_LISTENER = 4


def hold(connection: socket.socket) -> None:
    """Sends nothing."""


def garbage(connection: socket.socket) -> None:
    """Sends a megabyte of random bytes."""
    connection.sendall(random.Random(7).randbytes(1 << 20))


def http(connection: socket.socket) -> None:
    """Sends an HTTP request, as port scanners do."""
    connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def zeros(connection: socket.socket) -> None:
    connection.sendall(bytes(4096))


def oversized(connection: socket.socket) -> None:
    """Sends lengths that exceed any memory, in all common encodings."""
    for form in ("<I", ">I", "<Q", ">Q"):
        connection.sendall(struct.pack(form, (1 << 8 * struct.calcsize(form)) - 1))
    connection.sendall(b"\xff" * 4096)


def truncated(connection: socket.socket) -> None:
    """Sends a few bytes, then closes the stream."""
    connection.sendall(os.urandom(5))
    connection.shutdown(socket.SHUT_WR)


def reset(connection: socket.socket) -> None:
    """Sends a few bytes, then resets the connection."""
    connection.sendall(os.urandom(5))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def slow(connection: socket.socket) -> None:
    """Sends a byte at long intervals."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        connection.sendall(b"\0")
        time.sleep(0.2)


def echo(connection: socket.socket) -> None:
    """Sends all received bytes back, as in a reflection attack."""
    while data := connection.recv(4096):
        connection.sendall(data)


MANNERS = (hold, garbage, http, zeros, oversized, truncated, reset, slow, echo)


def main(manner: str, address: str, port: str) -> int:
    behave = {function.__name__: function for function in MANNERS}[manner]
    try:
        connection = socket.create_connection((address, int(port)), PATIENCE_S)
    except ConnectionRefusedError:
        return NO_LISTENER
    print("connected", flush=True)
    with connection:
        connection.settimeout(PATIENCE_S)
        try:
            behave(connection)
            if connection.fileno() < 0:
                return 0
            while data := connection.recv(4096):
                sys.stdout.buffer.write(data)
        except TimeoutError:
            return 3
        except OSError:  # shutdown also fails after a reset
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
