"""A device for tests: the CPU memory of other processes, with streams that run late.

Each stream is a thread that runs its work in order, after random delays. Ranks read and write each
other's memory with `process_vm_readv` and `process_vm_writev`. A missing wait therefore gives wrong
results, as it does on a GPU.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import queue
import random
import threading
import time
from contextlib import contextmanager, nullcontext

import numpy as np
import torch

from unisono.execution.fold import fold
from unisono.torch_backend.device import Address
from unisono.torch_backend.device.flag_page import FIRST_MESSAGE, MESSAGES, FlagPage
from unisono.torch_backend.device.peer_device import EXPORT_WORDS, SideStream

_ALLOCATION = 1  # all memory of a process
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Stream:
    def __init__(self, delay_s):
        self.delay_s, self._work = delay_s, queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work):
        self._work.put(work)

    def _run(self):
        while True:
            work = self._work.get()
            time.sleep(random.random() * self.delay_s)
            work()


class ProcessMemory:
    """The CPU memory of processes of one host as a `PeerDevice`."""

    def __init__(self, comm, performers=None, delay_s=0.002):
        self._comm, self._latest = comm, 0
        self.performers = performers or list(range(comm.size))
        self._default = _Stream(delay_s)
        self._side = {each: _Stream(delay_s) for each in SideStream}
        self._current = threading.local()
        self._messages = itertools.count()
        self._page = FlagPage(comm)
        self._flags = self._page.values
        self._pid = os.getpid()
        self._pids = comm.all_gather(np.array([self._pid])).tolist()

    def delay(self, stream, delay_s):
        """Makes a side stream later, or as fast as possible."""
        self._side[stream].delay_s = delay_s

    def connect(self):
        """Does nothing: the constructor is collective."""

    def locate(self, tensor):
        return (_ALLOCATION, tensor.data_ptr()) if tensor.numel() else (0, 0)

    def export(self, allocation):
        return np.full(EXPORT_WORDS, self._pid)

    def freed(self):
        return []

    def open(self, rank, allocation, words):
        assert allocation == _ALLOCATION, "memory that was not exported"
        assert list(words) == [self._pids[rank]] * EXPORT_WORDS

    def release_memory(self, rank, allocation):
        raise AssertionError("no memory was freed")

    def address(self, rank, allocation, offset):
        assert allocation == _ALLOCATION, "memory that was not exported"
        return Address(rank, offset)

    def prepare(self, targets, sources, nbytes, dtype, op, divisor):
        def run():
            values = [self._read(each, nbytes) for each in sources]
            if len(values) > 1:
                values = [fold(values, dtype, op, divisor)]
            for each in targets:
                self._write(each, values[0])

        return lambda: self._stream().put(run)

    def batch(self, records, waits):
        def enqueue(base):
            self._latest = base
            for event, offset in records:
                self._record(event, base + offset)
            for rank, event, offset in waits:
                self._wait(rank, event, base + offset)

        return enqueue

    def record_message(self):
        turn, place = divmod(next(self._messages), MESSAGES)
        self._record(FIRST_MESSAGE + place, turn + 1)
        return np.array([FIRST_MESSAGE + place, turn + 1])

    def wait_message(self, rank, words):
        self._wait(rank, int(words[0]), int(words[1]))

    def has_recorded(self, rank, event, number):
        return self._flags[rank, event] >= number

    def release(self):
        self._page.release(self._latest)

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

    def selected(self):
        return nullcontext()

    def staging(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    @contextmanager
    def on_side_stream(self, stream=SideStream.CALLS):
        before, self._current.stream = self._stream(), self._side[stream]
        try:
            yield
        finally:
            self._current.stream = before

    def close(self):
        self.synchronize(self.mark())
        for each in SideStream:
            with self.on_side_stream(each):
                self.synchronize(self.mark())
        self._page.leave(self._comm.rank)

    def _record(self, event, number):
        reached = self._flags[self._comm.rank]

        def reach():
            reached[event] = number

        self._stream().put(reach)

    def _wait(self, rank, event, number):
        reached = self._flags[rank]

        def wait():
            while reached[event] < number:
                time.sleep(1e-4)

        self._stream().put(wait)

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
        error = ctypes.get_errno()
        is_gone = moved < 0 and error == errno.ESRCH  # a rank that was killed
        assert is_gone or moved == data.nbytes, (address, moved, os.strerror(error))
