"""Kinds of arrays and element types: supported, converted, or refused with an error."""

from __future__ import annotations

import array
import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ranks import Threads
from unisono import Communicator, UnsupportedError
from unisono.execution.native_executor import OP_CODES
from unisono.types import Op

Array = NDArray[Any]
World = Callable[[int], Threads]

RANKS = 3


NO_ARRAYS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(8),
    "bytes": lambda: bytes(8),
    "memoryview": lambda: memoryview(bytearray(8)),
    "memoryview of an array": lambda: memoryview(np.zeros(8, np.uint8)),
    "array.array": lambda: array.array("B", bytes(8)),
    "ctypes": ctypes.c_uint8 * 8,
    "list": lambda: [0] * 8,
    "None": lambda: None,
    "a scalar": lambda: np.uint64(3),
    "masked": lambda: np.ma.masked_equal(np.arange(8, dtype=np.uint8), 3),
    "masked without a mask": lambda: np.ma.array(np.zeros(8, np.uint8)),
}


def bytes_of(count: int) -> Array:
    """Returns a valid array of `count` bytes."""
    return np.zeros(count, np.uint8)


IN_PLACE: list[Callable[[Communicator, Any], Any]] = [
    lambda c, x: c.all_reduce(x),
    lambda c, x: c.all_reduce(x, async_op=True).wait(),
    lambda c, x: c.broadcast(x),
    lambda c, x: c.reduce(x),
    lambda c, x: c.scan(x),
]
BETWEEN: list[Callable[[Communicator, Any], Any]] = [
    lambda c, x: c.all_gather(x, bytes_of(16)),
    lambda c, x: c.all_gather(bytes_of(4), x),
    lambda c, x: c.reduce_scatter(x, bytes_of(4)),
    lambda c, x: c.reduce_scatter(bytes_of(16), x),
    lambda c, x: c.all_to_all(x, bytes_of(8)),
    lambda c, x: c.all_to_all(bytes_of(8), x),
    lambda c, x: c.all_to_all(x),
    lambda c, x: c.all_gather_v(x),
]


@pytest.mark.parametrize("name", NO_ARRAYS)
def test_other_objects_than_arrays_are_refused_in_every_call(name: str, threads: World) -> None:
    def check(comm: Communicator) -> None:
        thing = NO_ARRAYS[name]()
        # Calls with an input and a result array also accept None and lists of arrays.
        for call in IN_PLACE if name in ("None", "list") else IN_PLACE + BETWEEN:
            texts = set()
            for _ in range(2):
                with pytest.raises(TypeError, match="a NumPy array or a CPU torch ten") as caught:
                    call(comm, thing)
                texts.add(str(caught.value))
                call(comm, bytes_of(8))  # prepares the fast path for this call
            assert len(texts) == 1
        for message in (comm.send, comm.recv):
            with pytest.raises(TypeError, match="a NumPy array or a CPU torch tensor"):
                message(thing, 1 - comm.rank)
        assert comm.all_reduce(np.ones(1)).tolist() == [2]

    threads(2).run(check)


def test_a_masked_array_is_refused_with_an_advice(threads: World) -> None:
    x = np.ma.masked_equal(np.arange(4.0), 3)

    def check(comm: Communicator) -> None:
        for _ in range(2):
            with pytest.raises(TypeError, match=re.escape("give its .data or its .filled()")):
                comm.all_reduce(x)
        assert comm.all_reduce(x.filled(1)).tolist() == [0, 2, 4, 2]

    threads(2).run(check)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_subclasses_of_arrays_work(threads: World, tmp_path: Path) -> None:
    class Named(np.ndarray[Any, Any]):
        pass

    def mapped(comm: Communicator) -> Array:
        x = np.memmap(tmp_path / str(comm.rank), np.int64, "w+", shape=(5,))
        x[:] = comm.rank + 1
        return x

    kinds: list[Callable[[Communicator], Array]] = [
        lambda c: np.full(5, c.rank + 1, np.int64).view(Named),
        lambda c: np.matrix(np.full((1, 5), c.rank + 1, np.int64)),
        lambda c: np.rec.array(np.full(5, c.rank + 1, np.int64)),
        mapped,
    ]

    def body(comm: Communicator) -> None:
        for kind in kinds:
            for _ in range(2):
                x = kind(comm)
                assert comm.all_reduce(x) is x
                assert np.asarray(x).ravel().tolist() == [6] * 5
        assert np.fromfile(tmp_path / str(comm.rank), np.int64).tolist() == [6] * 5
        x = np.memmap(tmp_path / str(comm.rank), np.int64, "r")
        for _ in range(2):
            with pytest.raises(ValueError, match="read-only"):
                comm.all_reduce(x)
            assert comm.all_gather(x, np.zeros(15, np.int64)).tolist() == [6] * 15

    threads(RANKS).run(body)


@pytest.mark.parametrize(
    "dtype",
    [
        "O", "S3", "U2", "M8[s]", "m8[s]", "longdouble", "clongdouble", "V4", "f4,f4", "f4,i8",
        {"names": ["v", "i"], "formats": ["f4", "i4"], "offsets": [4, 0]},
        {"names": ["v", "i"], "formats": ["f4", "i4"], "offsets": [0, 4], "itemsize": 12},
    ],
)  # fmt: skip
def test_unsupported_element_types_are_refused_in_every_call(dtype: Any, threads: World) -> None:
    def body(comm: Communicator) -> None:
        comm.broadcast(np.zeros(3, "f4,i4"))  # prepares the fast path for such calls
        for x in (np.zeros(3, dtype), np.zeros(6, dtype)[::2], np.zeros(3, dtype)):
            with pytest.raises(UnsupportedError, match=r"elements of type .* are not supported"):
                comm.broadcast(x)
        assert comm.all_reduce(np.ones(1)).tolist() == [2]

    threads(2).run(body)


def test_gather_and_scatter_take_no_fast_path(threads: World) -> None:
    # The fast path checks two arrays. Ranks other than the root have only one array, and the root's
    # input may lie inside its result.
    def body(comm: Communicator) -> None:
        x, out = np.ones(3), np.zeros(3)
        comm.gather(x, out)
        comm.scatter(x, out)
        for op in (Op.GATHER, Op.SCATTER):
            assert comm._engine.quick(OP_CODES[op], x, out, "sum", 0, None, False) is None
        comm.all_gather(x, out)
        code = OP_CODES[Op.ALL_GATHER]
        assert comm._engine.quick(code, x, out, "sum", -1, None, False) is out

    threads(1).run(body)


def test_more_element_types_than_the_cache_holds_work(threads: World) -> None:
    def body(comm: Communicator) -> None:
        for i in range(600):  # each dtype with metadata is a separate object
            x = np.full(3, comm.rank + 1, np.dtype("f4", metadata={"i": i}))
            assert comm.all_reduce(x).tolist() == [6] * 3

    threads(RANKS).run(body)
