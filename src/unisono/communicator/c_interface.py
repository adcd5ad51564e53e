"""The group of a communicator for programs in C, C++, Rust or Julia; see `unisono.h`."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

from unisono import native
from unisono.communicator.call_cache import SHARED, CallRequest
from unisono.execution import OP_CODES
from unisono.types import DType, Op, ReduceOp

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator

_OPERATIONS = {code: op for op, code in OP_CODES.items()}
_MOST_BYTES = 1 << 62
_CAPSULE = b"unisono.group.v1"
_ADDRESS_TYPE = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_address_in = _ADDRESS_TYPE(("PyCapsule_GetPointer", ctypes.pythonapi))


def get_include() -> str:
    """Returns the folder of `unisono.h`, for `-I` of a compiler.

    >>> import unisono
    >>> Path(unisono.get_include(), "unisono.h").is_file()
    True
    """
    package = Path(__file__).parents[1]
    folders = [package / "include", package.parents[1] / "csrc" / "capi"]  # wheel, source tree
    return str(next(each for each in folders if (each / "unisono.h").is_file()))


def c_interface(self: Communicator) -> object:
    """Returns a capsule named "unisono.group.v1" whose pointer is a `unisono_group` of `unisono.h`.

    The capsule keeps this communicator alive, and so does every owner in C (`retain`). After
    `close`, functions in C fail with the status of an aborted group.

    >>> import unisono
    >>> with unisono.init(rank=0, size=1, rendezvous="example of c_interface") as comm:
    ...     print(type(comm.c_interface()).__name__)
    PyCapsule
    """
    self._require_open()
    return native.c_group(self._group, Owner(self))


def group_address(capsule: object) -> int:
    """Returns the address of the `unisono_group` in a capsule of `c_interface`, for ctypes.

    Keep the capsule while C uses the group. Raises `ValueError` for another object.

    >>> import ctypes, unisono
    >>> with unisono.init(rank=0, size=1, rendezvous="example of group_address") as comm:
    ...     capsule = comm.c_interface()
    ...     group = ctypes.c_void_p(unisono.group_address(capsule))
    """
    address: int = _address_in(capsule, _CAPSULE)
    return address


class Owner:
    """Answers what C asks of a communicator. Any thread may call the methods."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def prepare(
        self, op: int, dtype: int, reduction: int, root: int, count: int
    ) -> native.Prepared:
        """Returns the call of a `unisono_collective`.

        Raises `ValueError` and `UnsupportedError` for arguments that no call can have.
        """
        self._comm._require_open()
        operation, element = _operation(op), _element(dtype)
        cache, ranks = self._comm._engine.call_cache, self._comm.size
        if operation is Op.BARRIER:
            return cache.barrier()
        nbytes = count * element.size_bytes
        if nbytes * ranks > _MOST_BYTES:
            raise ValueError(f"count: expected fewer elements than {count}")
        request = CallRequest(
            operation,
            (nbytes,) * (ranks if operation in SHARED else 1),
            element,
            _reduction(reduction) if operation.reduces else ReduceOp.SUM,
            root if operation.rooted else -1,
        )
        cache.check(request)
        if cache.widens(request):  # C has no wider copy, so one rank rounds the sum once
            request = request._replace(algorithm="direct")
        return cache.call(request)

    def split(self, color: int, key: int) -> object | None:
        """Returns the capsule of this rank's part of the group, or None for a negative color."""
        part = self._comm.split(None if color < 0 else color, key)
        return None if part is None else c_interface(part)

    def reach(self, peer: int) -> None:
        """Begins to connect this rank to `peer`, or to all ranks for ANY_SOURCE."""
        self._comm._require_open()
        self._comm._engine.reach(peer)


def _operation(code: int) -> Op:
    if code not in _OPERATIONS:
        raise ValueError(f"op: expected an operation of unisono.h, got {code}")
    return _OPERATIONS[code]


def _element(code: int) -> DType:
    if code > DType.FLOAT8_E5M2:
        raise ValueError(f"dtype: expected a type of unisono.h, got {code}")
    return DType(code)


def _reduction(code: int) -> ReduceOp:
    if code > ReduceOp.LXOR:
        raise ValueError(f"reduction: expected a reduction of unisono.h, got {code}")
    return ReduceOp(code)
