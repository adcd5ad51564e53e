"""The library that jax loads as its MPI, with the functions of Python that it calls."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

from unisono import native
from unisono.communicator import Communicator, group_address

_JOIN = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.POINTER(ctypes.c_double), ctypes.c_void_p, ctypes.c_uint64
)
_CHECK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)


class _Program(ctypes.Structure):
    _fields_ = [("join", _JOIN), ("check", _CHECK)]


class MpiLibrary:
    """`libunisono_mpi.so`, which jax and this object load once."""

    def __init__(self, join: Callable[[], Communicator], refusal: Callable[[], str | None]) -> None:
        """`join` joins the group of all processes. `refusal` returns why jax must not make a
        communicator, or None."""
        self.path = str(Path(native.library_folder(), "libunisono_mpi.so"))
        self._join_group, self._refusal = join, refusal
        self._capsule: object = None
        self._program = _Program(_JOIN(self._join), _CHECK(self._check))
        ctypes.CDLL(self.path).unisono_mpi_use(ctypes.byref(self._program))

    def _join(self, timeout_s: ctypes._Pointer[ctypes.c_double], text: int, size: int) -> int:
        """Returns the group, which its capsule keeps alive, or 0 after an error."""
        try:
            comm = self._join_group()
            timeout_s[0] = comm.timeout_s
            self._capsule = comm.c_interface()
            return group_address(self._capsule)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            # jax ignores this error, and waits for all processes before its first collective
            print(f"unisono.jax: this process has no collectives: {reason}", file=sys.stderr)
            _write(text, size, reason)
            return 0

    def _check(self, text: int, size: int) -> int:
        try:
            refusal = self._refusal()
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
        if refusal is not None:
            _write(text, size, refusal)
        return int(refusal is not None)


def _write(text: int, size: int, value: str) -> None:
    encoded = value.encode()[: size - 1] + b"\0"
    ctypes.memmove(text, encoded, len(encoded))
