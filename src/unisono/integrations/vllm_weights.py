"""vLLM's weight transfer engine `unisono`: weights from a trainer to vLLM's workers, through CPU
memory.

vLLM's option `weight_transfer_config={"backend": "unisono"}` chooses the engine of the workers. The
trainer makes its end with `WeightTransferTrainerFactory.trainer_init`, as of any other engine.
Weights travel layer by layer, so that both ends hold one layer beside the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from unisono.errors import CollectiveTimeoutError, PeerLostError, UnsupportedError
from unisono.weight_transfer import WeightReceiver, WeightSender

_POLL_S = 0.001


@dataclass
class UnisonoWeightTransferInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The address at which a worker connects to the trainer."""

    address: str
    """The text `WeightSender.address` of the trainer. It contains a random key."""


@dataclass
class UnisonoWeightTransferUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The numbers of an update's parts, which a worker expects."""

    first: int
    """Number of the first part: `WeightReceiver.number` after it has arrived."""
    parts: int
    """Number of parts in which the weights arrive."""


@dataclass
class UnisonoTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Settings of the trainer's end. `rank` is the trainer's rank; rank 0 sends."""

    backend: ClassVar[str] = "unisono"

    timeout_s: float = 300.0
    """Limit of each exchange with the workers."""


class UnisonoWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """The end of a worker of vLLM."""

    init_info_cls = UnisonoWeightTransferInitInfo
    update_info_cls = UnisonoWeightTransferUpdateInfo

    _receiver: WeightReceiver | None = None

    def init_transfer_engine(self, init_info: UnisonoWeightTransferInitInfo) -> None:
        """Connects to the trainer, in the place of an earlier connection."""
        self.shutdown()
        self._receiver = WeightReceiver(init_info.address)

    def start_weight_update(self) -> None:
        """Prepares the model for weights in the format of a checkpoint."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Completes the layers that are not yet complete."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives weights and loads them into the model."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UnisonoWeightTransferUpdateInfo) -> None:
        """Receives all parts and loads them. An error ends the connection to the trainer, which
        then sends this worker no more parts. Raises `PeerLostError` if the trainer has ended.
        """
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        if self._receiver is None:
            raise PeerLostError(
                "this worker has no connection to a trainer: call init_weight_transfer_engine"
            )
        try:
            with disable_mtp_completeness_check():
                for part in range(update_info.parts):
                    weights = self._receiver.receive()
                    if weights is None:
                        raise PeerLostError("the trainer has closed its end during an update")
                    if self._receiver.number != update_info.first + part:
                        raise PeerLostError("this worker has missed a part of the weights")
                    self.model.load_weights(iter(weights.items()))
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Ends the connection to the trainer."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()


class UnisonoTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The end of the trainer. Rank 0 sends; the other ranks only take part in reading the source.

    Workers may come and go between two updates. A new one connects when it gets `worker_init_info`
    through vLLM's `init_weight_transfer_engine`; one that has ended is left out.
    """

    init_info_cls = UnisonoTrainerInitInfo

    _sender: WeightSender | None = None
    _timeout_s: float = 0.0

    @classmethod
    def trainer_init(
        cls, init_info: UnisonoTrainerInitInfo, *, client: Any, source: Any = None
    ) -> UnisonoTrainerWeightTransferEngine:
        """Connects the workers that the client reaches, and returns the trainer's end."""
        if source is None:
            raise ValueError("source: expected a WeightSource, such as ModuleSource(model)")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender:
            engine._timeout_s = init_info.timeout_s
            engine._sender = WeightSender(timeout_s=init_info.timeout_s)
            client.init_weight_transfer_engine(engine.worker_init_info)
        return engine

    @property
    def worker_init_info(self) -> dict[str, Any]:
        """The argument of `init_weight_transfer_engine` for workers that join later."""
        return asdict(UnisonoWeightTransferInitInfo(self._open_sender().address))

    def send_weights(self) -> None:
        """Sends all weights of the source to all connected workers, and returns when the workers
        have loaded them.

        A worker that dies on the way is logged and left out. Raises the client's error, and
        `PeerLostError` if no worker is left; `ValueError` if the source yields other parameters
        than its metadata say.
        """
        parts = self._parts()
        if not self.is_sender:
            for _ in parts:
                pass
            return
        sender = self._open_sender()
        members = sender.connected
        info = UnisonoWeightTransferUpdateInfo(
            first=sender.number + 1, parts=len(self.source.groups())
        )
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            update = pool.submit(self.client.update_weights, asdict(info))
            try:
                for part in parts:
                    members = _await_workers(sender, members, update, self._timeout_s)
                    sender.send(part, only=members)
            except BaseException:
                self.shutdown()  # ends the workers' wait for the next part
                raise
            update.result()
        self.client.finish_weight_update()

    def _parts(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the parameters of each layer, in CPU memory."""
        declared = {each.name: (each.dtype, tuple(each.shape)) for each in self.source.metadata()}
        for names, tensors in self.source.iter_groups():
            part = dict(zip(names, tensors, strict=True))
            for name, tensor in part.items():
                found = (tensor.dtype, tuple(tensor.shape))
                if found != declared[name]:
                    raise ValueError(
                        f"source: {name} is {found}, but metadata() says {declared[name]}"
                    )
            yield {name: tensor.detach().cpu() for name, tensor in part.items()}

    def _open_sender(self) -> WeightSender:
        if self._sender is None:
            raise UnsupportedError(
                "this end of the trainer is closed, or not of rank 0: call trainer_init"
            )
        return self._sender

    def shutdown(self) -> None:
        """Ends the connections to all workers."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


def _await_workers(
    sender: WeightSender, members: frozenset[str], update: Future[None], timeout_s: float
) -> frozenset[str]:
    """Waits until the living workers of an update want the next part; returns their names.

    Raises the client's error if the call that makes them wait has ended, `PeerLostError` if no
    worker is left.
    """
    deadline = time.monotonic() + timeout_s
    while not (members := members & sender.connected) <= (waiting := sender.waiting):
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"send_weights: timeout after {timeout_s:g} s: {len(members - waiting)} of "
                f"{len(members)} workers do not wait for weights; the client must reach all "
                "workers that have worker_init_info"
            )
        if update.done():
            break
        time.sleep(_POLL_S)
    if update.done():
        update.result()
    if not members or update.done():
        raise PeerLostError(
            "no worker of vLLM waits for weights: pass worker_init_info to its "
            "init_weight_transfer_engine"
        )
    return members
