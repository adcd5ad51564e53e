"""The libraries that jax and MLX load as their MPI, with the functions of Python that they call."""

from __future__ import annotations

import contextlib
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
_FLUSH = ctypes.CFUNCTYPE(None)


class _Program(ctypes.Structure):
    _fields_ = [("join", _JOIN), ("check", _CHECK), ("flush", _FLUSH)]


class MpiLibrary:
    """A library of the core's folder, which another library and this object load once."""

    def __init__(
        self,
        name: str,
        join: Callable[[], Communicator | None],
        refusal: Callable[[], str | None] | None = None,
    ) -> None:
        """`join` joins the group of all processes, or returns None if this process is alone.
        `refusal` returns why no communicator can be made, or None."""
        self.path = str(Path(native.library_folder(), name))
        self._join_group, self._refusal = join, refusal
        self._capsule: object = None
        check = _CHECK(self._check) if refusal else _CHECK()
        self._program = _Program(_JOIN(self._join), check, _FLUSH(_flush))
        self.functions = ctypes.CDLL(self.path)
        self.functions.unisono_mpi_use(ctypes.byref(self._program))

    def end(self) -> None:
        """Lets calls fail that would need Python. Call it when the interpreter ends."""
        self.functions.unisono_mpi_end()

    def _join(self, timeout_s: ctypes._Pointer[ctypes.c_double], text: int, size: int) -> int:
        """Returns the group, which its capsule keeps alive, or 0 after an error."""
        try:
            comm = self._join_group()
            if comm is None:
                return 0
            timeout_s[0] = comm.timeout_s
            self._capsule = comm.c_interface()
            return group_address(self._capsule)
        except Exception as error:
            _write(text, size, f"{type(error).__name__}: {error}")
            return 0

    def _check(self, text: int, size: int) -> int:
        try:
            refusal = self._refusal() if self._refusal else None
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
        if refusal is not None:
            _write(text, size, refusal)
        return int(refusal is not None)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or a pipe that nobody reads
            stream.flush()


def _write(text: int, size: int, value: str) -> None:
    encoded = value.encode()[: size - 1] + b"\0"
    ctypes.memmove(text, encoded, len(encoded))
