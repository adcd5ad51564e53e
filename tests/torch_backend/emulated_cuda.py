"""`CudaDevice` on the emulated driver `emulated_cuda.cc`, with tensors in CPU memory.

Everything but torch's CUDA functions and CUDA itself is the real code: the calls of the driver,
shared allocations, flags, and the launches of kernels, which are compiled for the CPU.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

from torch_backend.cpu_kernels import build, for_cpu, with_device
from unisono.torch_backend.device import fold_kernel
from unisono.torch_backend.device.cuda_device import CudaDevice
from unisono.torch_backend.device.flag_page import FlagPage
from unisono.torch_backend.device.peer_device import SideStream

_SOURCE = Path(__file__).with_name("emulated_cuda.cc").read_text()
_Work = ctypes.CFUNCTYPE(None)


class EmulatedCuda(CudaDevice):
    """A CUDA device of one process. All ranks have the same device, as on one GPU."""

    def __init__(self, comm, folder, sibling=None):
        self.driver_file = build(_SOURCE, folder, "-O1", "-pthread")
        self.emulated = ctypes.CDLL(str(self.driver_file))
        self.emulated.emulated_allocate.restype = ctypes.c_uint64
        self.emulated.emulated_allocate.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
        self.emulated.emulated_free.argtypes = (ctypes.c_uint64,)
        self.emulated.emulated_put.argtypes = (ctypes.c_void_p, _Work)
        self._folder = folder
        self._current = threading.local()
        self._kept = []
        place, library = torch.device("cuda", 0), str(self.driver_file)
        super().__init__(comm, place, FlagPage(comm), sibling, library)

    def tensor(self, values, at=0):
        """Returns a tensor in an allocation of its own, which must stay until `free`."""
        values = torch.as_tensor(values)
        nbytes = max(values.nbytes, 4096)
        base = self.emulated.emulated_allocate(nbytes, at)
        memory = (ctypes.c_uint8 * nbytes).from_address(base)
        found = torch.frombuffer(memory, dtype=values.dtype, count=values.numel())
        return found.view(values.shape).copy_(values)

    def free(self, tensor):
        """Frees the allocation that begins with a tensor; returns its address."""
        self.emulated.emulated_free(tensor.data_ptr())
        return tensor.data_ptr()

    def calls(self):
        """Returns the number of calls of the driver since the last question."""
        return self.emulated.emulated_calls()

    def mark(self):
        reached = threading.Event()
        self.enqueue(reached.set)
        return reached

    def wait_mark(self, mark):
        if mark is not None:
            self.enqueue(mark.wait)

    def has_passed(self, mark):
        return mark is None or mark.is_set()

    def synchronize(self, mark):
        assert mark.wait(30)

    def enqueue(self, work):
        def run():
            work()

        self._kept.append(_Work(run))
        self.emulated.emulated_put(self._handle(), self._kept[-1])

    def keep(self, tensors):
        self.enqueue(partial(id, tensors))

    def selected(self):
        return nullcontext()

    @contextmanager
    def on_side_stream(self, stream=SideStream.CALLS):
        before, self._current.stream = self._handle(), 1 + int(stream)
        try:
            yield
        finally:
            self._current.stream = before

    def staging(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def require_here(self, tensor):
        assert tensor.is_cpu

    def close(self):
        self.synchronize(self.mark())
        for stream in SideStream:
            with self.on_side_stream(stream):
                self.synchronize(self.mark())
        self._flags.close()
        self._memory.close_all()
        self._page.leave(self._rank)

    def _prepare_process(self):
        fold_kernel.compiled = self._compiled
        self.emulated.emulated_begin()
        self._uuid = b"the only device."
        self._use("sm_90", 2)

    def _compiled(self, source, architecture):
        return str(build(with_device(for_cpu(source)), self._folder)).encode()

    def _handle(self):
        return getattr(self._current, "stream", 0)
