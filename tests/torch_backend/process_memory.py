"""A device for tests: the CPU memory of other processes, with streams that run late.

Each stream is a thread that runs its work in order, after random delays. Ranks read and write each
other's memory with `process_vm_readv` and `process_vm_writev`. A missing wait therefore gives wrong
results, as it does on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import queue
import random
import threading
import time
from contextlib import contextmanager

import numpy as np

from unisono.execution.fold import fold
from unisono.torch_backend.device import Address
from unisono.torch_backend.device.flag_page import FLAGS, FlagPage
from unisono.torch_backend.device.peer_device import EVENT_WORDS, EXPORT_WORDS

_FIRST_MESSAGE_SLOT = 8
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Stream:
    def __init__(self, delay_s):
        self._delay_s, self._work = delay_s, queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work):
        self._work.put(work)

    def _run(self):
        while True:
            work = self._work.get()
            time.sleep(random.random() * self._delay_s)
            work()


class ProcessMemory:
    """The CPU memory of processes of one host as a `PeerDevice`."""

    def __init__(self, comm, performers=None, delay_s=0.002):
        self._comm, self._delay_s = comm, delay_s
        self.performers = performers or list(range(comm.size))
        self._default, self._side = _Stream(delay_s), _Stream(delay_s)
        self._current = threading.local()
        self._messages = itertools.count()
        self._page = FlagPage(comm)
        self._flags = self._page.values
        self._pids = comm.all_gather(np.array([os.getpid()])).tolist()

    def connect(self):
        """Does nothing: messages need the events before the first collective."""

    def export(self, tensor):
        words = np.zeros(EXPORT_WORDS, np.int64)
        words[0] = tensor.data_ptr() if tensor.numel() else 0
        return words

    def address(self, rank, words):
        assert words[0], "memory that was not exported"
        return Address(rank, int(words[0]))

    def fold(self, targets, sources, nbytes, dtype, op, divisor):
        def run():
            values = [self._read(each, nbytes) for each in sources]
            if len(values) > 1:
                values = [fold(values, dtype, op, divisor)]
            for each in targets:
                self._write(each, values[0])

        self._stream().put(run)

    def record(self, event, number):
        reached = self._flags[self._comm.rank]

        def reach():
            reached[event] = number

        self._stream().put(reach)

    def wait(self, rank, event, number):
        reached = self._flags[rank]

        def wait():
            while reached[event] < number:
                time.sleep(1e-4)

        self._stream().put(wait)

    def record_message(self):
        turn, place = divmod(next(self._messages), FLAGS - 1 - _FIRST_MESSAGE_SLOT)
        words = np.zeros(EVENT_WORDS, np.int64)
        words[:2] = _FIRST_MESSAGE_SLOT + place, turn + 1
        self.record(int(words[0]), turn + 1)
        return words

    def wait_message(self, rank, words):
        self.wait(rank, int(words[0]), int(words[1]))

    def has_recorded(self, rank, event, number):
        return self._flags[rank, event] >= number

    def release(self, number):
        self._page.release(number)

    def has_lost_rank(self):
        return self._page.has_lost_rank()

    def mark(self):
        reached = threading.Event()
        self._stream().put(reached.set)
        return reached

    def wait_mark(self, mark):
        if mark is not None:
            self._stream().put(mark.wait)

    def has_passed(self, mark):
        return mark is None or mark.is_set()

    def synchronize(self, mark):
        assert mark.wait(30)

    def enqueue(self, work):
        self._stream().put(work)

    def keep(self, tensors):
        self._stream().put(functools.partial(id, tensors))

    @contextmanager
    def on_side_stream(self):
        before, self._current.stream = self._stream(), self._side
        try:
            yield
        finally:
            self._current.stream = before

    def close(self):
        self.synchronize(self.mark())
        with self.on_side_stream():
            self.synchronize(self.mark())
        self._page.leave(self._comm.rank)

    def _stream(self):
        return getattr(self._current, "stream", self._default)

    def _read(self, address, nbytes):
        data = np.empty(nbytes, np.uint8)
        self._transfer(_LIBC.process_vm_readv, address, data)
        return data

    def _write(self, address, data):
        self._transfer(_LIBC.process_vm_writev, address, np.ascontiguousarray(data))

    def _transfer(self, function, address, data):
        here = _Piece(data.ctypes.data, data.nbytes)
        there = _Piece(address.value, data.nbytes)
        pid = self._pids[address.rank]
        moved = function(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        assert moved == data.nbytes, (address, moved, os.strerror(ctypes.get_errno()))
