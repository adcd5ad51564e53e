"""The communicator as the process group uses it: with what torch asks for beyond it."""

from __future__ import annotations

from typing import Any, Final

import torch

from unisono.errors import MismatchError
from unisono.torch_backend.loopback import Loopback
from unisono.torch_backend.private import hide_from_dynamo
from unisono.torch_backend.work import Together

CALLS: Final = frozenset(
    {
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "gather",
        "scatter",
        "barrier",
        "send",
        "recv",
    }
)
"""The calls of a communicator that may be recorded, watched, or issued with `async_op`."""

# No program can use it: torch's tags are those of C++ int.
_EXCHANGE_TAG: Final = 1 << 63


class Endpoint:
    """A communicator that also sends to itself, and whose uneven exchanges do not wait.

    What needs no change is the communicator's own bound method: it costs nothing to pass here.
    """

    def __init__(self, comm: Any) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._comm = comm
        self._loopback = Loopback(lambda: float(comm.timeout_s))
        for name in CALLS - {"all_to_all", "send", "recv"}:
            setattr(self, name, getattr(comm, name))

    def send(self, x: torch.Tensor, dst: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Send to any rank; to this one it is a copy, done at once."""
        if dst == self.rank:
            return self._loopback.send(x, tag)
        return self._comm.send(x, dst, tag, async_op=async_op)

    def recv(
        self, x: torch.Tensor, src: int | None = None, tag: int = 0, *, async_op: bool = False
    ) -> Any:
        """Receive from any rank; from this one too if it is named, or has sent already."""
        if src == self.rank or (src is None and self._loopback.has(tag)):
            handle = self._loopback.receive(x, tag, self.rank)
            return handle if async_op else handle.wait()
        return self._comm.recv(x, src, tag, async_op=async_op)

    def all_to_all(self, x: Any, out: Any, *, async_op: bool = False) -> Any:
        """Exchange one tensor cut in equal shares, or lists of one tensor for each rank."""
        if not isinstance(x, list) and not isinstance(out, list):
            return self._comm.all_to_all(x, out, async_op=async_op)
        handle = self._exchange(_pieces(x, self.size), _pieces(out, self.size))
        return handle if async_op else handle.wait()

    def _exchange(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> Together:
        """One message a pair: each rank knows its own lengths, and they are enough.

        Its header carries type and length, so the receiver notices where the two disagree. The
        empty-handed all_to_all before it carries the fingerprint by which the group notices ranks
        that are in some other call.
        """
        mine, place = sources[self.rank], targets[self.rank]
        if mine.dtype != place.dtype or mine.numel() != place.numel():
            text = (
                f"all_to_all: rank {self.rank} sends itself {mine.numel()} elements of "
                f"{mine.dtype}, but receives {place.numel()} of {place.dtype}"
            )
            self._comm.abort(text)  # only this rank sees it, and the others wait for its messages
            raise MismatchError(text)
        sources = _apart(sources, targets)
        token = torch.zeros(self.size, dtype=torch.uint8)
        handles = [self._comm.all_to_all(token, torch.empty_like(token), async_op=True)]
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        for peer in reversed(peers):
            handles.append(self._comm.recv(targets[peer], peer, _EXCHANGE_TAG, async_op=True))
        for peer in peers:
            handles.append(self._comm.send(sources[peer], peer, _EXCHANGE_TAG, async_op=True))
        with torch.no_grad():
            place.copy_(sources[self.rank].view(place.shape))
        return Together(handles)


def _pieces(x: Any, ranks: int) -> list[torch.Tensor]:
    if not isinstance(x, list):
        if x.numel() % ranks:
            raise ValueError(f"{x.numel()} elements: no equal shares for {ranks} ranks")
        return list(x.view(ranks, -1))
    if len(x) != ranks:
        raise ValueError(f"all_to_all needs one tensor for each of {ranks} ranks, not {len(x)}")
    if len({piece.dtype for piece in x}) > 1:
        raise ValueError("the tensors of one all_to_all have different types")
    return x


def _apart(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of sources that arriving messages might overwrite before they are sent."""
    taken = {target.untyped_storage().data_ptr() for target in targets if target.numel()}
    return [
        source.detach().clone() if source.untyped_storage().data_ptr() in taken else source
        for source in sources
    ]


hide_from_dynamo(Endpoint)
