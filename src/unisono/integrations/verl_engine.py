"""verl's checkpoint engine `unisono`: weights from the trainer to the rollout workers, through CPU
memory.

verl imports this module if its configuration names it:

    rollout.checkpoint_engine.backend=unisono
    rollout.checkpoint_engine.custom_backend_module=unisono.integrations.verl_engine
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from unisono.errors import PeerLostError
from unisono.weight_transfer import WeightReceiver, WeightSender

Weights = dict[str, torch.Tensor]


@CheckpointEngineRegistry.register("unisono")
class UnisonoCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """The end of a rank of the trainer, or of a rollout worker.

    Rank 0 of the trainer sends; its other ranks only take part in reading the weights. The workers
    connect for each update, so that replicas may join, leave or die between two updates. Weights
    travel in buckets of about `bucket_size` bytes, of whole tensors.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = 300.0) -> None:
        self._bucket_bytes = bucket_size
        self._timeout_s = timeout_s
        self._sender = WeightSender(timeout_s=timeout_s) if is_master else None
        self._receiver: WeightReceiver | None = None
        self._next = 0
        """Number of the worker's next bucket."""

    def prepare(self) -> dict[str, Any]:
        """Returns, on the trainer's rank 0, the address of the sender and the number of the next
        bucket; elsewhere nothing.
        """
        if self._sender is None:
            return {}
        return {"address": self._sender.address, "first": self._sender.number + 1}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Returns the arguments of `init_process_group` for the trainer and for the workers."""
        nothing = dict.fromkeys(metadata[0], [None] * actor_wg_world_size)
        return nothing, {name: [each] * rollout_world_size for name, each in metadata[0].items()}

    def init_process_group(self, address: str | None, first: int | None) -> None:
        """Connects a worker to the sender with this address; does nothing on the trainer."""
        if address is not None and first is not None:
            self._leave()
            self._receiver, self._next = WeightReceiver(address), first

    def finalize(self) -> None:
        """Ends a worker's connection."""
        self._leave()

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Sends all weights to the connected workers; an empty bucket ends the update."""
        buckets = self._buckets(weights)
        if self._sender is None:
            async for _ in buckets:
                pass
            return
        try:
            async for bucket in buckets:
                await _send(self._sender, bucket)
            await _send(self._sender, {})
        except BaseException:
            self._end()  # ends the workers' wait for the next bucket
            raise

    async def _buckets(self, weights: Any) -> AsyncIterator[Weights]:
        """Yields the weights in CPU memory, several tensors at once."""
        bucket: Weights = {}
        nbytes = 0
        async for name, tensor in ensure_async_iterator(weights):
            if bucket and nbytes + tensor.nbytes > self._bucket_bytes:
                yield bucket
                bucket, nbytes = {}, 0
            # the trainer may use the tensor's memory for the next one
            bucket[name] = torch.empty_like(tensor, device="cpu").copy_(tensor.detach())
            nbytes += tensor.nbytes
        if bucket:
            yield bucket

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yields names and tensors, as they arrive. Raises `PeerLostError` if the trainer ends."""
        if self._receiver is None:
            raise PeerLostError("this worker is not connected: call init_process_group")
        while (bucket := await asyncio.to_thread(self._receiver.receive)) is not None:
            if self._receiver.number != self._next:
                raise PeerLostError("this worker has missed a part of the weights")
            self._next += 1
            if not bucket:
                return
            for item in bucket.items():
                yield item
        raise PeerLostError("the trainer has closed its end during an update")

    def _leave(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def _end(self) -> None:
        """Closes the sender, and makes one for the next update."""
        assert self._sender is not None
        timeout_s = self._timeout_s
        self._sender.close()
        self._sender = WeightSender(timeout_s=timeout_s)


async def _send(sender: WeightSender, bucket: Weights) -> None:
    """Sends a bucket to the workers that live."""
    sent = await asyncio.to_thread(sender.send, bucket, workers=0)
    if not sent.workers:
        raise PeerLostError("no rollout worker is connected: all have died, or left")
