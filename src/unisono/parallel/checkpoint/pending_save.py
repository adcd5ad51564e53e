"""A checkpoint that a thread writes while the program goes on, from copies of the blocks.

DCP's own stager copies whole storages: all of a flat array of optimizer states, of which a rank
writes a part. Here a rank copies only the blocks that it writes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import distributed as dist

from unisono.parallel.checkpoint.checkpoint_folder import from_all
from unisono.parallel.checkpoint.tensor_block import TensorBlock

_Key = tuple[str, tuple[int, ...]]


class PendingSave:
    """A checkpoint that is being written, which `ParallelRun.async_save` returns.

    An error is printed when it happens, since the program may end before its next call. The
    interpreter waits for the thread at its end.
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        """Starts a thread that calls `write`, which writes the checkpoint `path`."""
        self.path = path
        """The folder of the checkpoint."""
        self.blocked_s = 0.0
        """Seconds for which `async_save` has blocked the program."""
        self._error: Exception | None = None
        self._is_told = False
        """The program knows the error."""
        self._thread = threading.Thread(target=self._run, args=(write,), name="unisono-checkpoint")
        self._thread.start()

    def __str__(self) -> str:
        return f"the asynchronous save to {self.path}"

    def done(self) -> bool:
        """Returns True after the thread has written the checkpoint, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the checkpoint is complete on all ranks.

        Raises `RuntimeError` if it could not be written, on all ranks.
        """
        self._thread.join()
        if (error := self.failure()) is not None:
            self.tell()
            raise error from self._error

    def failure(self) -> RuntimeError | None:
        """Returns the error of a save that has failed."""
        if self._error is None:
            return None
        found = RuntimeError(self._text(self._error))
        found.__cause__ = self._error
        return found

    def untold_failure(self) -> RuntimeError | None:
        """Returns the error of a save that has failed, if the program does not know it."""
        return None if self._is_told else self.failure()

    def tell(self) -> None:
        """Notes that the program knows an error of this save."""
        self._is_told = True

    def join(self) -> None:
        """Waits for the end of the save, also if it fails."""
        self._thread.join()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # raised by `wait`, and by the next step or save
            self._error = error
            print(f"unisono: {self._text(error)}", file=sys.stderr, flush=True)

    def _text(self, error: Exception) -> str:
        return f"{self} failed: {type(error).__name__}: {' '.join(str(error).split())}"


def staged_blocks(
    blocks: Sequence[TensorBlock], group: dist.ProcessGroup | None
) -> list[TensorBlock]:
    """Returns copies, in CPU memory, of the blocks that this rank writes. Collective.

    Of several ranks that pass the same block, the one with the fewest bytes so far writes it.
    """
    sizes = {(each.name, each.start): each.values.nbytes for each in blocks if each.values.numel()}
    ranks = from_all(sizes, group)
    holders: dict[_Key, list[int]] = {}
    for rank, found in enumerate(ranks):
        for key in found:
            holders.setdefault(key, []).append(rank)
    filled = [0] * len(ranks)
    mine = set[_Key]()
    own = dist.get_rank(group) if dist.is_initialized() else 0
    for key, who in sorted(holders.items(), key=lambda each: -ranks[each[1][0]][each[0]]):
        writer = min(who, key=lambda rank: filled[rank])
        filled[writer] += ranks[writer][key]
        if writer == own:
            mine.add(key)
    return [
        replace(each, values=each.values.detach().to("cpu", copy=True))
        for each in blocks
        if (each.name, each.start) in mine
    ]
