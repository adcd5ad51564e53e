"""Certificates for tests, and a proxy that records the bytes sent between ranks."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

OPENSSL = shutil.which("openssl")

needs_openssl = pytest.mark.program("openssl")
"""Marks a test that uses certificates, which the program openssl makes."""

_EXPIRED = """
[ca]
default_ca = here
[here]
database = {folder}/index
new_certs_dir = {folder}
serial = {folder}/serial
default_md = sha256
policy = any
[any]
commonName = supplied
"""


class Authority:
    """A certificate authority with its own folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.file = folder / "ca.pem"
        self._key = folder / "ca.key"
        self._run("req", "-x509", *_NEW_KEY, "-keyout", self._key, "-out", self.file,
                  "-subj", f"/CN=authority of {folder.parent.name}", "-days", "2")  # fmt: skip

    def member(self, name: str, *, expired: bool = False) -> dict[str, str]:
        """Makes a certificate and returns the environment variables of a rank that uses it."""
        key, request, made = (self._folder / f"{name}.{what}" for what in ("key", "csr", "pem"))
        self._run("req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        if expired:
            # forgets the certificates that this authority issued before
            (self._folder / "index").write_text("")
            (self._folder / "serial").write_text("01")
            config = self._folder / "ca.conf"
            config.write_text(_EXPIRED.format(folder=self._folder))
            self._run("ca", "-batch", "-config", config, "-cert", self.file, "-keyfile", self._key,
                      "-in", request, "-out", made, "-startdate", "20200101000000Z",
                      "-enddate", "20200201000000Z", "-notext")  # fmt: skip
        else:
            self._run("x509", "-req", "-in", request, "-CA", self.file, "-CAkey", self._key,
                      "-CAcreateserial", "-out", made, "-days", "2")  # fmt: skip
        return variables(certificate=made, key=key, authority=self.file)

    @staticmethod
    def _run(*words: object) -> None:
        assert OPENSSL is not None
        subprocess.run([OPENSSL, *map(str, words)], check=True, capture_output=True)


_NEW_KEY: Sequence[str] = (
    "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
)  # fmt: skip


def variables(*, certificate: Path, key: Path, authority: Path) -> dict[str, str]:
    """Returns the environment variables of a rank that uses these certificate files."""
    return {
        "UNISONO_TLS": "certificates",
        "UNISONO_TLS_CERTIFICATE": str(certificate),
        "UNISONO_TLS_KEY": str(key),
        "UNISONO_TLS_CA": str(authority),
    }


class Tap:
    """A proxy for connections. It records all bytes of both directions. It forwards the result of
    `change(chunk)` instead of each chunk.
    """

    def __init__(self, change: Callable[[bytes], bytes] = lambda chunk: chunk) -> None:
        self.received = bytearray()
        self._change = change
        self._lock = threading.Lock()

    def dial(self, to: tuple[str, int]) -> tuple[str, int]:
        """Returns the address of a new listener, which forwards one connection to the address
        `to`.
        """
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(listener, to), daemon=True).start()
        address: tuple[str, int] = listener.getsockname()
        return address

    def _serve(self, listener: socket.socket, to: tuple[str, int]) -> None:
        with listener:
            near, _ = listener.accept()
        try:
            far = socket.create_connection(to)
        except OSError:
            near.close()
            return
        with near, far:
            back = threading.Thread(target=self._copy, args=(far, near), daemon=True)
            back.start()
            self._copy(near, far)
            back.join()

    def _copy(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := one.recv(1 << 16):
                with self._lock:
                    self.received += chunk
                other.sendall(self._change(chunk))
        for sock in (one, other):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
