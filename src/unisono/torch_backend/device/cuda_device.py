"""A CUDA device whose memory the ranks of one host share, by CUDA's interprocess communication."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from unisono.errors import UnsupportedError
from unisono.torch_backend.device.cuda_driver import CudaDriver
from unisono.torch_backend.device.cuda_memory import CudaMemory
from unisono.torch_backend.device.cuda_stream import CudaStream
from unisono.torch_backend.device.flag_page import FIRST_MESSAGE, MESSAGES, FlagPage
from unisono.torch_backend.device.fold_kernel import MOST_ARRAYS, FoldKernels, require_compiler
from unisono.torch_backend.device.open_memory import OpenMemory
from unisono.torch_backend.device.peer_device import Address, Launch, Record, Wait, Words
from unisono.torch_backend.device.refusals import agree
from unisono.torch_backend.device.stream_flags import FlagBatch, StreamFlags
from unisono.torch_backend.private import hide_from_dynamo
from unisono.types import DType, ReduceOp


class CudaDevice(CudaStream):
    """This rank's CUDA device: memory of other ranks, copies, reductions, and flags as events."""

    def __init__(
        self,
        comm: Any,
        device: torch.device,
        page: FlagPage,
        sibling: CudaDevice | None = None,
        library: str = "libcuda.so.1",
    ) -> None:
        """`comm`: a communicator of the ranks, for `connect`. `sibling`: that of another group, if
        any, which has the same open allocations. `library`: the driver's file."""
        self.performers: Sequence[int] = range(comm.size)
        super().__init__(device)
        self._comm, self._page, self._library = comm, page, library
        self._sibling = sibling
        self._rank = int(comm.rank)
        self._messages = itertools.count()
        self._uuid = b""

    @property
    def open_memory(self) -> OpenMemory | None:
        """The open allocations of this process; None before `connect`."""
        return self._memory.opened if "_memory" in self.__dict__ else None

    def connect(self) -> None:
        """Prepares this process, and exchanges the identities of the devices with all ranks."""
        problem: Exception | None = None
        try:
            self._prepare_process()
        except (UnsupportedError, RuntimeError) as error:
            problem = error
        agree(self._comm, problem, "CUDA tensors cannot be shared")
        mine = np.frombuffer(self._uuid, np.uint8)
        rows = self._comm.all_gather(mine).reshape(self._comm.size, -1)
        uuids = [row.tobytes() for row in rows]
        self.performers = [uuids.index(uuid) for uuid in uuids]

    def locate(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Returns the driver's number of a tensor's allocation, and the offset."""
        self.require_here(tensor)
        pointer = tensor.data_ptr()
        return self._memory.locate(pointer) if pointer and tensor.numel() else (0, 0)

    def export(self, allocation: int) -> Words:
        """Returns the handle of an allocation, its address and this process."""
        return self._memory.export(allocation)

    def freed(self) -> list[int]:
        """Returns exported allocations that no longer exist, each once."""
        return self._memory.freed()

    def open(self, rank: int, allocation: int, words: Words) -> None:
        """Opens an allocation of a rank, unless it is open."""
        self._memory.open(rank, allocation, words)

    def release_memory(self, rank: int, allocation: int) -> None:
        """Closes an allocation that its rank has freed."""
        self._memory.close(rank, allocation)

    def address(self, rank: int, allocation: int, offset: int) -> Address:
        """Returns an address in an open allocation."""
        return Address(rank, self._memory.address(rank, allocation, offset))

    def prepare(
        self,
        targets: Sequence[Address],
        sources: Sequence[Address],
        nbytes: int,
        dtype: DType,
        op: ReduceOp,
        divisor: int,
    ) -> Launch:
        """Prepares a copy by the driver, or a reduction in one pass over memory."""
        if len(sources) > MOST_ARRAYS:
            raise UnsupportedError(
                f"a reduction on a device combines at most {MOST_ARRAYS} ranks, got {len(sources)}"
            )
        if len(sources) == 1:
            dtype, op, divisor = DType.UINT8, ReduceOp.SUM, 1
        read, written = [each.value for each in sources], [each.value for each in targets]
        handle = self._handle
        if len(read) == len(written) == 1:
            copy, target, source = self._driver.copy, written[0], read[0]
            return lambda: copy(target, source, nbytes, handle())
        first, rest = written[:MOST_ARRAYS], written[MOST_ARRAYS:]
        launch = self._kernels.prepare(first, read, nbytes, dtype, op, divisor)
        if not rest:
            return lambda: launch(handle())
        # a source may be a target that is written already
        return lambda: self._launch_and_copy(launch, first[0], rest, nbytes)

    def batch(self, records: Sequence[Record], waits: Sequence[Wait]) -> Callable[[int], None]:
        """Prepares writes of flags, after which the current stream waits for flags."""
        return FlagBatch(self._flags, self._rank, records, waits)

    def record_message(self) -> Words:
        """Writes a flag of a message when the current stream gets there."""
        turn, place = divmod(next(self._messages), MESSAGES)
        self._flags.write(FIRST_MESSAGE + place, turn + 1)
        return np.array([FIRST_MESSAGE + place, turn + 1])

    def wait_message(self, rank: int, words: Words) -> None:
        """Makes the current stream wait for the flag of a message."""
        self._flags.wait(rank, int(words[0]), int(words[1]))

    def has_recorded(self, rank: int, event: int, number: int) -> bool:
        """Returns True if a flag of a rank has the number."""
        return self._flags.has_reached(rank, event, number)

    def release(self) -> None:
        """Writes large numbers to all flags."""
        self._page.release(self._flags.latest)

    def has_lost_rank(self) -> bool:
        """Returns True if the process of a rank has ended before the rank left."""
        return self._page.has_lost_rank()

    def close(self) -> None:
        """Closes the memory of other ranks and unmaps the flags, after the device's work."""
        if "_flags" in self.__dict__:
            torch.cuda.synchronize(self._device)
            self._flags.close()
            self._memory.close_all()
        self._page.leave(self._rank)

    def _prepare_process(self) -> None:
        require_compiler()
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize()  # creates the context that the driver needs
        found: Any = torch.cuda.get_device_properties(self._device)
        self._uuid = bytes(found.uuid.bytes)
        self._use(f"sm_{found.major}{found.minor}", found.multi_processor_count)

    def _use(self, architecture: str, processors: int) -> None:
        """Uses the driver. This thread has a context."""
        self._driver = CudaDriver(self._library)
        opened = None if self._sibling is None else self._sibling.open_memory
        if opened is None:
            opened = OpenMemory(self._driver)
        self._memory, self._sibling = CudaMemory(self._driver, opened), None
        self._kernels = FoldKernels(self._driver, architecture, processors)
        self._flags = StreamFlags(self._driver, self._page, self._rank, self._handle)

    def _launch_and_copy(
        self, launch: Callable[[int], None], source: int, targets: Sequence[int], nbytes: int
    ) -> None:
        stream = self._handle()
        launch(stream)
        for target in targets:
            self._driver.copy(target, source, nbytes, stream)


hide_from_dynamo(CudaDevice)
