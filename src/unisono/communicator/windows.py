"""One-sided access: a rank writes and reads the arrays of other ranks without a call of theirs.

`window` is a method of `Communicator`.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono import native
from unisono.communicator import collective_calls
from unisono.communicator.arguments import as_integer, check_rank
from unisono.communicator.arrays import Array, dtype_of, locate, stage
from unisono.communicator.engine import Call, Engine
from unisono.communicator.own_exchange import exchange_of
from unisono.errors import MismatchError, UnsupportedError
from unisono.types import DType

if TYPE_CHECKING:
    from unisono.communicator.communicator import Communicator

_MOST_ELEMENTS = 1 << 56


class Window:
    """An array of each rank, which the other ranks write by `put` and read by `get`.

    `Communicator.window` makes it. Ranks and elements are numbers: `window.put(x, 1, 4)` writes `x`
    to elements 4, 5, ... of rank 1's array. Every `x` has the element type of the arrays.

    **Order.** Signals order the accesses. A rank that has waited for a signal of a peer sees all
    that the peer's thread put to this rank before the signal. Without a signal, the owner may see
    any part of a put. No other rank may access the same elements at the same time, unless all only
    read. Between hosts, call `fence` between two puts to the same elements.

    **Errors.** Wrong arguments raise an error in this rank only, and change nothing. `wait` takes
    at most the communicator's timeout. So do `put`, `get` and `fence` between hosts. A lost rank
    and a timeout fail the communicator, as for a collective. The arrays then become private memory
    with the contents that they have, so that no other rank can still change them.

    Any thread may use a window. Calls are neither part of the order of collectives nor of batches.
    """

    __slots__ = ("_dtype", "_engine", "_open", "array")

    def __init__(self, engine: Engine, opened: native.Window, array: Array, dtype: DType) -> None:
        self._engine = engine
        self._open: native.Window | None = opened
        self._dtype = dtype
        self.array = array
        """This rank's array."""

    def __repr__(self) -> str:
        state = "" if self._open else "closed "
        return f"Window({state}array of {self._dtype.name.lower()} on {self._engine.size} ranks)"

    def put(self, x: Array, dst: int, at: int = 0, *, signal: bool = False) -> None:
        """Writes `x` to the array of rank `dst`, from element `at` on. Returns when the program may
        change `x`: after the copy, or when the network has taken `x`. With `signal=True`, then adds
        a signal, like `signal`.

        >>> import numpy as np, unisono
        >>> with unisono.init(rank=0, size=1, rendezvous="example of put") as comm:
        ...     array = comm.empty(4, np.float32)
        ...     array[...] = 0
        ...     with comm.window(array) as window:
        ...         window.put(np.ones(2, np.float32), dst=0, at=1, signal=True)
        ...         window.wait(src=0)
        ...         print(array)
        [0. 1. 1. 0.]
        """
        opened = self._open or self._closed()
        if opened.put(x, dst, at, signal) is NotImplemented:
            dst, at = self._place(dst, at, "dst")
            self._check_type(x, "put")
            staged = stage(x, writable=False)
            opened.put_checked(
                staged.array if staged.copy is None else staged.copy,
                dst,
                at,
                bool(signal),
                self._engine.timeout_s,
            )

    def get(self, out: Array, src: int, at: int = 0) -> Array:
        """Reads elements of the array of rank `src` into `out`, from element `at` on. Returns
        `out`.
        """
        opened = self._open or self._closed()
        if opened.get(out, src, at) is NotImplemented:
            src, at = self._place(src, at, "src")
            self._check_type(out, "get")
            staged = stage(out, writable=True)
            array = staged.array if staged.copy is None else staged.copy
            opened.get_checked(array, src, at, self._engine.timeout_s)
            staged.restore()
        return out

    def signal(self, dst: int) -> None:
        """Adds a signal at rank `dst`. The puts of this thread to `dst` that came earlier arrive
        before the signal.
        """
        opened = self._open or self._closed()
        check_rank(dst, self._engine.size, "dst")
        opened.signal(dst)

    def wait(self, src: int, count: int = 1) -> None:
        """Waits for the next `count` signals of rank `src`, and takes them.

        Raises `TimeoutError` after the communicator's timeout, and `PeerLostError` if rank `src`
        has died or left.
        """
        opened = self._open or self._closed()
        check_rank(src, self._engine.size, "src")
        if not 0 <= as_integer(count, "count") < _MOST_ELEMENTS:
            raise ValueError(f"count: expected a number of signals, not {count}")
        opened.wait(src, count, self._engine.timeout_s)

    def signals(self, src: int) -> int:
        """Returns how many signals of rank `src` have arrived that no `wait` has taken."""
        opened = self._open or self._closed()
        check_rank(src, self._engine.size, "src")
        return opened.arrived(src)

    def fence(self) -> None:
        """Completes all puts and gets of this thread before anything that it does afterwards.

        A signal to the rank of the put needs no fence. Call `fence` before you tell a rank in
        another way, such as by a flag that it reads with `get`, or by a signal to a third rank.
        Between hosts, `fence` waits for the ranks to which this rank has put. It raises the errors
        of `wait`.
        """
        (self._open or self._closed()).fence(self._engine.timeout_s)

    def close(self) -> None:
        """Ends the access to the arrays. Collective: waits for all ranks, so that no rank uses the
        memory for something else while another still writes. A second call does nothing.
        """
        if self._open is not None:
            self._open.fence(self._engine.timeout_s)
            self._engine.collective("barrier", False, collective_calls.barrier)
            del self._engine.windows[self._open]
            self._open = None

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()

    def _closed(self) -> native.Window:
        raise ValueError("this window is closed")

    def _place(self, rank: int, at: int, name: str) -> tuple[int, int]:
        check_rank(rank, self._engine.size, name)
        if not 0 <= as_integer(at, "at") <= _MOST_ELEMENTS:
            raise ValueError(f"at: expected the number of an element, not {at}")
        return int(rank), int(at)

    def _check_type(self, x: Array, what: str) -> None:
        found = dtype_of(x, f"{what}: ")
        if found is not self._dtype:
            raise TypeError(
                f"{what}: expected {self._dtype.name.lower()}, the type of the window's arrays, "
                f"not {found.name.lower()}"
            )


def window(self: Communicator, array: Array) -> Window:
    """Opens one array of each rank for `put` and `get` of the other ranks. Collective.

    `array` comes from `empty` or from `unisono.torch_backend.empty`, or is a part of such an array.
    Its elements are contiguous. Lengths may differ between ranks, the element type may not; an
    array without elements may have any origin. The communicator keeps the array until the window is
    closed.

    If the ranks are on several hosts, a thread of each rank writes and reads the rank's array for
    the ranks of other hosts, as long as the window is open.

    Raises `ValueError` for another array (`MismatchError` on the other ranks), `MismatchError` if
    the element types differ, and `UnsupportedError` if the group has no shared heaps.
    """
    engine = self._engine
    if not engine.group.heap_bytes:
        raise UnsupportedError("window: this group has no shared heap, since it has no memfd")
    signals = engine.group.allocate(native.signal_bytes(engine.size))
    signals.fill(0)
    # Connects to all ranks: a rank may access an array whose owner makes no further call.
    engine.reach(native.ANY_SOURCE)
    parts: list[native.WindowPart] = []
    table = engine.collective("window", False, _exchange, array, signals, parts)
    dtype = dtype_of(array)
    wrong = [rank for rank, row in enumerate(table) if int(row[4]) != dtype]
    if wrong:
        other = DType(int(table[wrong[0], 4]))
        raise MismatchError(
            f"window: rank {self.rank} has an array of {dtype.name.lower()}, but rank {wrong[0]} "
            f"one of {other.name.lower()}: give arrays of one type"
        )
    rows = [tuple(row) for row in table[:, :4].tolist()]
    opened = native.Window(parts[0], rows, dtype)
    engine.windows[opened] = (array, signals)
    return Window(engine, opened, array, dtype)


def _exchange(
    engine: Engine,
    array: Array,
    signals: np.ndarray[Any, Any],
    parts: list[native.WindowPart],
) -> Call:
    """Opens this rank's part of the window, which it adds to `parts`. Returns the call that gathers
    the places of all parts, and the types of the arrays.

    A peer may use the part as soon as the peer's call has returned, so the part is open before.
    """
    dtype = dtype_of(array, "window: ")
    located = locate(array, True)
    offset = located and native.heap_offset(engine.group, *located[:2])
    if located and located[1] == 0:
        offset = 0
    if located is None or offset is None:
        raise ValueError(
            "window: expected a contiguous array from empty of this communicator, or of "
            "unisono.torch_backend: other ranks cannot reach other memory"
        )
    own = native.heap_offset(engine.group, signals.ctypes.data, signals.nbytes) or 0
    part = native.WindowPart(engine.group, offset, located[1], own)
    parts.append(part)
    return exchange_of(engine, "window", [offset, located[1], own, part.number, dtype])
