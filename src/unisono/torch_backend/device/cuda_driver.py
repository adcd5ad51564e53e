"""The functions of CUDA's driver that are used, by ctypes.

A call takes less than 1 us of the host. With `cuda-bindings` it takes 2 to 5 us.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from unisono.errors import UnsupportedError

HANDLE_BYTES: Final = 64
"""Length of the handle of an allocation for other processes."""

_INVALID_CONTEXT = 201
_BUFFER_ID = 7  # an attribute of a pointer
_LAZY_PEER_ACCESS = 1
_PORTABLE, _DEVICE_MAP = 1, 2  # options of registered host memory
_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2

_Pointer, _Device, _Int, _Size = (
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_uint,
    ctypes.c_size_t,
)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class StreamOperation(ctypes.Structure):
    """A write of a 32-bit number by a stream, or a wait until the number in memory is as large.

    The layout is that of `CUstreamBatchMemOpParams`. Numbers are compared modulo 2**32.
    """

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("number", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
    )

    @classmethod
    def write(cls, address: int, number: int = 0) -> StreamOperation:
        """Returns a write."""
        return cls(operation=_WRITE_VALUE_32, address=address, number=number)

    @classmethod
    def wait(cls, address: int, number: int = 0) -> StreamOperation:
        """Returns a wait."""
        return cls(operation=_WAIT_VALUE_32, address=address, number=number)


_PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    "cuCtxGetCurrent": (_Pointer,),
    "cuCtxSetCurrent": (_Pointer,),
    "cuGetErrorName": (ctypes.c_int, _Pointer),
    "cuPointerGetAttribute": (_Pointer, ctypes.c_int, _Device),
    "cuMemGetAddressRange_v2": (_Pointer, _Pointer, _Device),
    "cuIpcGetMemHandle": (_Pointer, _Device),
    "cuIpcOpenMemHandle_v2": (_Pointer, _Handle, _Int),
    "cuIpcCloseMemHandle": (_Device,),
    "cuMemHostRegister_v2": (_Pointer, _Size, _Int),
    "cuMemHostGetDevicePointer_v2": (_Pointer, _Pointer, _Int),
    "cuMemHostUnregister": (_Pointer,),
    "cuStreamBatchMemOp_v2": (_Pointer, _Int, _Pointer, _Int),
    "cuMemcpyDtoDAsync_v2": (_Device, _Device, _Size, _Pointer),
    "cuModuleLoadData": (_Pointer, ctypes.c_char_p),
    "cuModuleGetFunction": (_Pointer, _Pointer, ctypes.c_char_p),
    "cuLaunchKernel": (_Pointer, *(_Int,) * 7, _Pointer, _Pointer, _Pointer),
}


class CudaDriver:
    """CUDA's driver in this process.

    Methods raise `UnsupportedError` with the name of a failure. The thread that makes an object
    must have a current context; other threads get this context when they need one.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            driver: Any = ctypes.CDLL(library)
            for name, types in _PROTOTYPES.items():
                function = getattr(driver, name)
                function.argtypes, function.restype = types, ctypes.c_int
        except (OSError, AttributeError) as error:
            raise UnsupportedError(f"cannot use CUDA's driver: {error}") from error
        self._driver = driver
        self._context = ctypes.c_void_p()
        self._call("find the context", driver.cuCtxGetCurrent, ctypes.byref(self._context))

    def buffer_id(self, pointer: int) -> int:
        """Returns the number of the allocation at an address. The driver never gives a number to a
        second allocation of the process."""
        found = ctypes.c_uint64()
        self._call(
            "find an allocation",
            self._driver.cuPointerGetAttribute,
            ctypes.byref(found),
            _BUFFER_ID,
            pointer,
        )
        return found.value

    def is_allocated(self, pointer: int, number: int) -> bool:
        """Returns True if the allocation at an address still has this number."""
        found = ctypes.c_uint64()
        status = self._driver.cuPointerGetAttribute(ctypes.byref(found), _BUFFER_ID, pointer)
        return status == 0 and found.value == number

    def start_of(self, pointer: int) -> int:
        """Returns the first address of the allocation at an address."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        found = self._driver.cuMemGetAddressRange_v2
        self._call("find an allocation", found, ctypes.byref(base), ctypes.byref(size), pointer)
        return base.value

    def export(self, base: int) -> bytes:
        """Returns the handle of an allocation for other processes."""
        handle = _Handle()
        self._call("share memory", self._driver.cuIpcGetMemHandle, ctypes.byref(handle), base)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Opens an allocation of another process; returns its address."""
        base, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        found = self._driver.cuIpcOpenMemHandle_v2
        self._call("open a peer's memory", found, ctypes.byref(base), given, _LAZY_PEER_ACCESS)
        return base.value

    def close(self, base: int) -> None:
        """Closes an allocation of another process. A failure leaves it open."""
        self._driver.cuIpcCloseMemHandle(base)

    def map_host(self, pointer: int, nbytes: int) -> int:
        """Pins host memory; returns the address at which the device has it."""
        found = ctypes.c_uint64()
        self.pin(pointer, nbytes)
        device = self._driver.cuMemHostGetDevicePointer_v2
        self._call("map host memory", device, ctypes.byref(found), pointer, 0)
        return found.value

    def pin(self, pointer: int, nbytes: int) -> None:
        """Pins host memory, so that the device copies to and from it without the host."""
        options = _PORTABLE | _DEVICE_MAP
        self._call("pin host memory", self._driver.cuMemHostRegister_v2, pointer, nbytes, options)

    def unpin(self, pointer: int) -> None:
        """Ends the pinning of host memory. A failure leaves it pinned."""
        self._driver.cuMemHostUnregister(pointer)

    def batch(self, stream: int, operations: Any) -> None:
        """Enqueues an array of `StreamOperation`, in order, on a stream."""
        batch = self._driver.cuStreamBatchMemOp_v2
        self._call("enqueue flags", batch, stream, len(operations), operations, 0)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueues a copy between addresses of the device."""
        self._call("copy", self._driver.cuMemcpyDtoDAsync_v2, target, source, nbytes, stream)

    def functions(self, image: bytes, names: tuple[bytes, ...]) -> tuple[int, ...]:
        """Loads compiled code; returns its functions of these names."""
        module, found = ctypes.c_void_p(), []
        self._call("load a reduction", self._driver.cuModuleLoadData, ctypes.byref(module), image)
        for name in names:
            function = ctypes.c_void_p()
            get = self._driver.cuModuleGetFunction
            self._call("load a reduction", get, ctypes.byref(function), module, name)
            found.append(function.value or 0)
        return tuple(found)

    def launch(self, function: int, blocks: int, threads: int, arguments: Any, stream: int) -> None:
        """Enqueues a function in `blocks` blocks of `threads` threads. `arguments`: a C array of
        the addresses of the arguments."""
        launch = self._driver.cuLaunchKernel
        self._call(
            "launch a reduction",
            launch,
            *(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, None),
        )

    def _call(self, what: str, function: Any, *arguments: Any) -> None:
        status = function(*arguments)
        if status == _INVALID_CONTEXT and self._context:  # this thread has not used CUDA yet
            self._driver.cuCtxSetCurrent(self._context)
            status = function(*arguments)
        if status:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(status, ctypes.byref(name))
            text = (name.value or b"error %d" % status).decode()
            raise UnsupportedError(f"cannot {what}: CUDA reports {text}")
