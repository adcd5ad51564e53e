"""The trainer's end: sends weights to all workers that are connected."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from unisono import config
from unisono.bootstrap import reserved_port, this_host
from unisono.closing import Closing
from unisono.communicator import Communicator
from unisono.errors import CollectiveTimeoutError, CommunicationError, RendezvousError
from unisono.transport import format_address
from unisono.weight_transfer.array_bytes import Array, ArrayBytes, array_bytes
from unisono.weight_transfer.connected_workers import ConnectedWorkers, Worker
from unisono.weight_transfer.manifest import Manifest
from unisono.weight_transfer.messages import (
    Answer,
    Closed,
    GroupPlace,
    Offer,
    Outcome,
    Ready,
    Start,
)
from unisono.weight_transfer.sender_address import KEY_BYTES, SenderAddress
from unisono.weight_transfer.transfer import SENDER, transfer

_log = logging.getLogger("unisono")
_JOIN_S = 20.0
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """Outcome of an update."""

    number: int
    """Number of the update, from 1."""
    workers: tuple[str, ...]
    """Names of the workers that have all weights."""
    failed: Mapping[str, str]
    """For each worker that took no part, or was lost, the reason."""
    nbytes: int
    """Bytes of the weights."""
    seconds: float
    """From the first offer until all workers had all weights."""


class WeightSender(Closing):
    """Sends weights to workers that come and go."""

    def __init__(self, *, timeout_s: float = 300.0) -> None:
        """`timeout_s`: how long an update waits for workers, and for each exchange with them."""
        self._timeout_s = timeout_s
        self._settings = config.settings()
        key = secrets.token_bytes(KEY_BYTES)
        self._workers = ConnectedWorkers(self._settings, key)
        host, port = self._workers.address
        self.address = SenderAddress(host=host, port=port, key=key).text()
        """The text that workers need to connect. It contains a random key: who knows the key
        receives the weights."""
        self._comm: Communicator | None = None
        self._members: list[Worker] = []
        """The workers of the group of the last update."""
        self._host = repr(this_host(self._settings.host_id))
        self.number = 0
        """Number of updates so far."""

    @property
    def workers(self) -> int:
        """Number of workers that are connected."""
        return len(self._workers.present())

    @property
    def connected(self) -> frozenset[str]:
        """Names of the workers that are connected."""
        return frozenset(each.name for each in self._workers.present())

    @property
    def waiting(self) -> frozenset[str]:
        """Names of the connected workers that have called `WeightReceiver.receive`."""
        return frozenset(each.name for each in self._workers.present() if each.is_ready)

    def send(
        self,
        weights: Mapping[str, Array],
        *,
        workers: int = 1,
        only: Collection[str] | None = None,
    ) -> WeightUpdate:
        """Sends all weights to all workers, and returns when they have them.

        Waits until at least `workers` workers are connected, then for each of them to call
        `WeightReceiver.receive`. A worker that does not call it within `timeout_s` seconds gets the
        next update. If a worker dies on the way, the others get the weights again. `only`: names of
        workers; the others get the next update.

        Raises `CollectiveTimeoutError` if too few workers connect, `TypeError` for values that are
        no arrays in CPU memory.
        """
        contents = {name: array_bytes(name, each) for name, each in weights.items()}
        manifest = Manifest.of(weights)
        self._await(workers)
        self.number += 1
        present, done = self._workers.present(), list[Worker]()
        pending = [each for each in present if only is None or each.name in only]
        failed: dict[str, str] = {}
        self._await_ready(pending, failed)
        begin_s = time.monotonic()
        while pending := [each for each in pending if each.name not in failed]:
            taking = self._offer(pending, manifest, failed)
            done += self._attempt(taking, manifest, contents, failed)
            pending = [each for each in taking if each not in done]
        for name, reason in failed.items():
            _log.warning("weights, update %d: %s: %s", self.number, name, reason)
        return WeightUpdate(
            number=self.number,
            workers=tuple(each.name for each in done),
            failed=failed,
            nbytes=manifest.nbytes,
            seconds=time.monotonic() - begin_s,
        )

    def _await(self, count: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while (found := self.workers) < count:
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"send of weights: timeout after {self._timeout_s:g} s: {found} of {count} "
                    "workers have connected"
                )
            time.sleep(_POLL_S)

    def _await_ready(self, workers: Sequence[Worker], failed: dict[str, str]) -> None:
        """Waits until all workers want an update; notes those that do not, or are lost."""
        busy = [each for each in workers if not each.is_ready]
        ready = self._workers.replies(busy, Ready, self._timeout_s)
        for each in busy:
            if each not in ready:
                late = f"has not called receive within {self._timeout_s:g} s"
                failed[each.name] = "has ended" if each.is_lost else late

    def _offer(
        self, workers: Sequence[Worker], manifest: Manifest, failed: dict[str, str]
    ) -> list[Worker]:
        """Returns the workers that take the update."""
        told = [each for each in workers if each.tell(Offer(manifest=manifest, number=self.number))]
        answers = self._workers.replies(told, Answer, self._timeout_s)
        self._drop_silent(workers, answers, failed)
        for each, answer in answers.items():
            if answer.refusal is not None:
                failed[each.name], each.is_ready = answer.refusal, False
        return [each for each in workers if each.name not in failed]

    @staticmethod
    def _drop_silent(
        workers: Sequence[Worker], replies: Mapping[Worker, object], failed: dict[str, str]
    ) -> None:
        """Ends the connections of workers without a reply, since their state is unknown."""
        for each in workers:
            if each not in replies:
                failed[each.name] = "has ended" if each.is_lost else "does not answer"
                each.drop()

    def _attempt(
        self,
        workers: list[Worker],
        manifest: Manifest,
        contents: Mapping[str, ArrayBytes],
        failed: dict[str, str],
    ) -> list[Worker]:
        """Sends the weights once; returns the workers that have them."""
        if not workers:
            return []
        error: Exception | None = None
        try:
            comm = self._group(workers)
            transfer(comm, manifest, contents)
        except (CommunicationError, RendezvousError) as caught:
            error = caught
            self._leave()
        outcomes = self._workers.replies(workers, Outcome, self._timeout_s)
        self._drop_silent(workers, outcomes, failed)
        found = [each for each, outcome in outcomes.items() if outcome.error is None]
        if len(found) < len(workers):
            self._leave()
        for each in found:
            each.is_ready = False
        if error is not None and len(outcomes) == len(workers) and not found:
            raise error  # no worker is lost, so another attempt would fail in the same way
        return found

    def _group(self, workers: list[Worker]) -> Communicator:
        """Returns the group of this sender and the workers, which they join."""
        if self._comm is not None and workers == self._members:
            for each in workers:
                each.tell(Start(group=None))
            return self._comm
        self._leave()
        secret = secrets.token_hex(32)
        with ExitStack() as stack:
            rendezvous = f"weights-{secrets.token_hex(16)}"
            if any(each.host != self._host for each in workers):
                where = (self._workers.address[0], stack.enter_context(reserved_port()))
                rendezvous = f"{config.TCP}{format_address(where)}/{rendezvous}"
            places = [
                GroupPlace(
                    world=config.LaunchedRank(
                        rank=rank, size=len(workers) + 1, rendezvous=rendezvous
                    ),
                    secret=secret,
                    join_timeout_s=min(_JOIN_S, self._timeout_s),
                    timeout_s=self._timeout_s,
                )
                for rank in range(len(workers) + 1)
            ]
            for place, each in zip(places[SENDER + 1 :], workers, strict=True):
                each.tell(Start(group=place))
            self._comm, self._members = places[SENDER].join(self._settings), workers
        return self._comm

    def _leave(self) -> None:
        """Leaves the group of the last update."""
        comm, self._comm, self._members = self._comm, None, []
        if comm is not None:
            comm.close()

    def close(self) -> None:
        """Tells the workers that no update follows: their `receive` returns None."""
        self._leave()
        self._workers.close(Closed())
