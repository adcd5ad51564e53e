"""A worker's messages in a step: it pushes all gradients and receives all parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from unisono import native
from unisono.communicator import Communicator, Work
from unisono.errors import AbortedError, CollectiveTimeoutError, CommunicationError
from unisono.parallel.parameter_server.byte_ranges import ByteLayout, ByteRange
from unisono.parallel.parameter_server.server_loop import LATE, ByteCounts
from unisono.parallel.parameter_server.server_messages import (
    FINISHED,
    Kind,
    Push,
    head_bytes,
    tag_of,
    write_head,
)
from unisono.parallel.parameter_server.server_plan import ServerPlan

_GRACE_S = 2.0


class WorkerExchange:
    """The messages of one worker in one group; each new group needs a new object.

    For each shard, a step sends a head and the ranges' gradients, and receives the ranges' values.
    All messages begin at once. A server replies for a range as soon as the range's
    gradients are complete, so both directions of a link are busy.
    """

    def __init__(
        self,
        comm: Communicator,
        layout: ByteLayout,
        plan: ServerPlan,
        shards: Sequence[Mapping[int, ByteRange]],
        owners: Sequence[int],
        gradients: torch.Tensor,
        values: torch.Tensor,
        bytes_: ByteCounts,
    ) -> None:
        """`shards`: the ranges of each shard, by number. `owners`: the server of each shard, as a
        rank in `comm`. `gradients` and `values`: the bytes of all parameters.
        """
        self._comm = comm
        self._owners = owners
        self._bytes = bytes_
        self._tensors = [np.array(layout.tensors_in(shard)) for shard in plan.shards]
        self._heads = [np.zeros(head_bytes(len(each)), np.uint8) for each in self._tensors]
        self._receives: list[native.Request] = []
        self._sends: list[native.Request] = []
        for shard, (head, owner) in enumerate(zip(self._heads, owners, strict=True)):
            self._sends.append(comm.send_init(head, owner, tag_of(Kind.HEAD, shard)))
        self._payload_bytes = 0
        for shard, number, within in _in_turn(shards, first=comm.rank):
            owner, here = owners[shard], slice(within.start, within.stop)
            tag = tag_of(Kind.VALUES, number)
            self._receives.append(comm.recv_init(values[here], owner, tag))
            tag = tag_of(Kind.GRADIENT, number)
            self._sends.append(comm.send_init(gradients[here], owner, tag))
            self._payload_bytes += 0 if owner == comm.rank else within.nbytes

    def exchange(self, push: Push, timeout_s: float) -> None:
        """Pushes the gradients of a step and receives the parameters for the next.

        `push.used` has a 1 for each tensor of the model with a gradient. Raises `PeerLostError` if
        a rank is lost, `CollectiveTimeoutError` if a server does not answer.
        """
        for head, tensors in zip(self._heads, self._tensors, strict=True):
            write_head(head, push._replace(used=push.used[tensors]))
        requests = [*self._receives, *self._sends]
        with _timeouts_by_name():
            works: list[Work] = [request.start() for request in requests]
        self._bytes.sent_bytes += self._payload_bytes
        what = f"the parameters after step {push.step}"
        self._wait(works, timeout_s + max(_GRACE_S, timeout_s / 10), what)
        self._bytes.received_bytes += self._payload_bytes

    def finish(self, timeout_s: float, *, known: bool) -> None:
        """Tells the servers that this worker has finished, and waits until all workers have.

        `known`: True if the servers know already that it has finished. Raises the errors of
        `exchange`.
        """
        works: list[Work] = []
        for shard, owner in enumerate(self._owners):
            end, tag = np.zeros(1, np.uint8), tag_of(Kind.END, shard)
            with _timeouts_by_name():
                works.append(self._comm.recv(end, owner, tag, async_op=True))
                if not known:
                    works.append(self._say_finished(shard, owner))
        self._wait(works, timeout_s, "the other workers to finish")

    def _say_finished(self, shard: int, owner: int) -> Work:
        tensors = len(self._tensors[shard])
        head = np.zeros(head_bytes(tensors), np.uint8)
        write_head(head, Push(FINISHED, np.zeros(tensors, np.uint8)))
        work: Work = self._comm.send(head, owner, tag_of(Kind.HEAD, shard), async_op=True)
        return work

    def _wait(self, works: list[Work], timeout_s: float, what: str) -> None:
        try:
            with _timeouts_by_name():
                Work.wait_all(works, timeout_s)
        except CommunicationError:
            raise
        except TimeoutError:
            servers = sorted(set(self._owners))
            text = (
                f"{LATE} after {timeout_s:g} s: rank {self._comm.rank} has waited for {what}: "
                f"the servers on ranks {servers} have not all answered"
            )
            self._comm.abort(text)
            raise CollectiveTimeoutError(text) from None


@contextmanager
def _timeouts_by_name() -> Iterator[None]:
    """Turns an `AbortedError` into `CollectiveTimeoutError` if a server's timeout caused it."""
    try:
        yield
    except AbortedError as error:
        if LATE in str(error):
            raise CollectiveTimeoutError(str(error)) from error
        raise


def _in_turn(
    shards: Sequence[Mapping[int, ByteRange]], first: int
) -> list[tuple[int, int, ByteRange]]:
    """Returns the ranges of all shards, alternating between the shards.

    Workers begin with different shards, so that no server receives all first ranges at once.
    """
    ordered = [
        (place, (shard - first) % len(shards), shard, number, within)
        for shard, ranges in enumerate(shards)
        for place, (number, within) in enumerate(ranges.items())
    ]
    return [(shard, number, within) for _, _, shard, number, within in sorted(ordered, key=_place)]


def _place(entry: tuple[int, int, int, int, ByteRange]) -> tuple[int, int]:
    return entry[:2]
