"""A device for tests: the CPU memory of other processes, with streams that run late.

Each stream is a thread that runs its work in order, after random delays. Ranks read and write each
other's memory with `process_vm_readv` and `process_vm_writev`. A missing wait therefore gives wrong
results, as it does on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import queue
import random
import threading
import time
from contextlib import contextmanager

import numpy as np

from unisono.execution.fold import fold
from unisono.torch_backend.device import Address
from unisono.torch_backend.device.peer_device import EVENT_WORDS, EXPORT_WORDS

_SLOTS = 64  # events of a rank: those of calls, then those of messages
_FIRST_MESSAGE_SLOT = 8
_PAGE = 2 * 8 * _SLOTS
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
        self._messages, self._recording = 0, threading.Lock()
        self._open_events()

    def connect(self):
        """Does nothing: messages need the events before the first collective."""

    def _open_events(self):
        fd = os.memfd_create("events")
        os.ftruncate(fd, _PAGE)
        rows = self._comm.all_gather(np.array([os.getpid(), fd])).reshape(-1, 2).tolist()
        self._pids = [pid for pid, _ in rows]
        self._counters = [_mapped(f"/proc/{pid}/fd/{number}") for pid, number in rows]
        self._comm.barrier()
        os.close(fd)

    def export(self, tensor):
        words = np.zeros(EXPORT_WORDS, np.int64)
        words[0] = tensor.data_ptr()
        return words

    def address(self, rank, words):
        return Address(rank, int(words[0]))

    def fold(self, targets, sources, nbytes, dtype, op, divisor):
        def run():
            values = [self._read(each, nbytes) for each in sources]
            if len(values) > 1:
                values = [fold(values, dtype, op, divisor)]
            for each in targets:
                self._write(each, values[0])

        self._stream().put(run)

    def record(self, event):
        self._record(int(event))

    def wait(self, rank, event):
        self._wait(rank, int(event))

    def record_message(self):
        self._messages += 1
        slot = _FIRST_MESSAGE_SLOT + self._messages % (_SLOTS - _FIRST_MESSAGE_SLOT)
        self._record(slot)
        words = np.zeros(EVENT_WORDS, np.int64)
        words[0] = slot
        return words

    def wait_message(self, rank, words):
        self._wait(rank, int(words[0]))

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
        """Does nothing: the operating system unmaps the events."""

    def _stream(self):
        return getattr(self._current, "stream", self._default)

    def _record(self, slot):
        issued, reached = self._counters[self._comm.rank]

        def reach():
            reached[slot] = max(number, reached[slot])

        with self._recording:
            number = issued[slot] + 1
            self._stream().put(reach)
            issued[slot] = number

    def _wait(self, rank, slot):
        issued, reached = self._counters[rank]
        number = issued[slot]

        def wait():
            while reached[slot] < number:
                time.sleep(1e-4)

        self._stream().put(wait)

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


def _mapped(path):
    fd = os.open(path, os.O_RDWR)
    memory = mmap.mmap(fd, _PAGE)
    os.close(fd)
    counters = np.frombuffer(memory, np.int64)
    return counters[:_SLOTS], counters[_SLOTS:]
