"""The C interface as a program in C sees it: the structures and functions of `unisono.h`, by
ctypes, which releases the GIL in each call."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char, c_double, c_int32, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

import unisono
from unisono import Communicator

HEADER = Path(unisono.get_include(), "unisono.h").read_text()
NAMES = {name: int(value) for name, value in re.findall(r"UNISONO_(\w+) = (\d+)", HEADER)}
ANY_TAG = (1 << 64) - 1
TYPES = {
    "float32": 0, "float64": 1, "float16": 2, "int8": 4, "uint8": 5, "int16": 6, "uint16": 7,
    "int32": 8, "uint32": 9, "int64": 10, "uint64": 11, "bool": 12, "complex64": 13,
    "complex128": 14,
}  # fmt: skip


class Error(ctypes.Structure):
    _fields_ = [("text", c_char * 1024)]


class Collective(ctypes.Structure):
    _fields_ = [
        ("op", c_uint32),
        ("dtype", c_uint32),
        ("reduction", c_uint32),
        ("root", c_int32),
        ("count", c_uint64),
    ]


class Message(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("count", c_uint64),
        ("dtype", c_uint32),
        ("peer", c_int32),
        ("tag", c_uint64),
    ]


_FAILURE = POINTER(Error)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "rank": (c_uint32, c_void_p),
    "ranks": (c_uint32, c_void_p),
    "retain": (None, c_void_p),
    "release": (None, c_void_p),
    "prepare": (c_int32, c_void_p, POINTER(Collective), POINTER(c_void_p), _FAILURE),
    "free_call": (None, c_void_p),
    "run": (c_int32, c_void_p, c_void_p, c_void_p, c_double, _FAILURE),
    "begin": (c_int32, c_void_p, c_void_p, c_void_p, c_double, POINTER(c_void_p), _FAILURE),
    "send": (c_int32, c_void_p, POINTER(Message), c_double, _FAILURE),
    "receive": (c_int32, c_void_p, POINTER(Message), c_double, POINTER(c_int32), POINTER(c_uint64),
                _FAILURE),
    "begin_send": (c_int32, c_void_p, POINTER(Message), c_double, POINTER(c_void_p), _FAILURE),
    "begin_receive": (c_int32, c_void_p, POINTER(Message), c_double, POINTER(c_void_p), _FAILURE),
    "wait": (c_int32, c_void_p, c_double, _FAILURE),
    "test": (c_int32, c_void_p, _FAILURE),
    "split": (c_int32, c_void_p, c_int32, c_int32, POINTER(c_void_p), _FAILURE),
    "abort": (None, c_void_p, ctypes.c_char_p),
}  # fmt: skip


class Api(ctypes.Structure):
    _fields_ = [
        ("size", c_uint32),
        ("version", c_uint32),
        *((name, ctypes.CFUNCTYPE(*types)) for name, types in _FUNCTIONS.items()),
    ]


class Failed(Exception):
    """A function that returned a status other than UNISONO_OK."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class CGroup:
    """A group of C. Methods raise `Failed`."""

    def __init__(self, pointer: int, owner: object = None) -> None:
        self.pointer, self._owner = pointer, owner
        self.api = Api.from_address(c_void_p.from_address(pointer).value or 0)

    @classmethod
    def of(cls, comm: Communicator) -> CGroup:
        """Returns the group of a capsule, which it keeps alive."""
        capsule = comm.c_interface()
        return cls(unisono.group_address(capsule), capsule)

    def call(self, name: str, *args: Any) -> None:
        """Calls a function with a last argument for its error."""
        error = Error()
        status = getattr(self.api, name)(*args, byref(error))
        if status:
            raise Failed(status, error.text.decode())

    @contextmanager
    def prepared(
        self, op: str, dtype: str, count: int, *, reduction: str = "SUM", root: int = -1
    ) -> Iterator[c_void_p]:
        """Prepares a collective, and frees it at the end of the block."""
        made, found = (
            Collective(NAMES[op], TYPES.get(dtype, 99), NAMES.get(reduction, 99), root, count),
            c_void_p(),
        )
        self.call("prepare", self.pointer, byref(made), byref(found))
        try:
            yield found
        finally:
            self.api.free_call(found)

    def run(
        self,
        op: str,
        x: NDArray[Any] | None,
        out: NDArray[Any] | None,
        count: int,
        **options: Any,
    ) -> None:
        """Prepares a collective and runs it once."""
        some = x if x is not None else out
        dtype = "uint8" if some is None else some.dtype.name
        with self.prepared(op, dtype, count, **options) as call:
            self.call("run", call, address(x), address(out), 30.0)

    def begun(self, name: str, *args: Any) -> c_void_p:
        """Begins a call or a message; returns its request."""
        request = c_void_p()
        self.call(name, *args, byref(request))
        return request


def address(x: NDArray[Any] | None) -> int | None:
    return None if x is None else x.ctypes.data


def message(x: NDArray[Any], peer: int, tag: int = 0) -> Any:
    return byref(Message(x.ctypes.data, x.size, TYPES[x.dtype.name], peer, tag))
