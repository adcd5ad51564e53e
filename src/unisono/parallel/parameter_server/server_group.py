"""The group of a parameter server: its communicator and plan, and this rank's shards and thread."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from unisono.communicator import Communicator
from unisono.errors import CollectiveTimeoutError, CommunicationError, PeerLostError
from unisono.parallel.parameter_server.member_state import (
    LostUpdates,
    MemberState,
    exchange_states,
)
from unisono.parallel.parameter_server.model_bytes import ModelBytes
from unisono.parallel.parameter_server.range_state import RangeState
from unisono.parallel.parameter_server.served_shard import OptimizerFactory, ServedShard
from unisono.parallel.parameter_server.server_loop import ByteCounts, ServerCounts, ServerLoop
from unisono.parallel.parameter_server.server_plan import ServerPlan
from unisono.parallel.parameter_server.shard_snapshots import (
    ShardSnapshots,
    pack_shard,
    unpack_shard,
)
from unisono.parallel.parameter_server.worker_exchange import WorkerExchange

_log = logging.getLogger("unisono.parallel")
# In effect no timeout of the communicator, since a server may wait long for a push. The server's
# loop detects late workers.
_IDLE_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings that must be equal on all ranks of a parameter server."""

    staleness: int | None
    range_bytes: int
    snapshot_every: int
    snapshot_folder: Path | None
    timeout_s: float


class ServerGroup:
    """One rank's part of a parameter server.

    `number` is the rank's number in the first group, which does not change after losses. `step` and
    `finished` are the rank's progress as a worker.
    """

    def __init__(
        self,
        comm: Communicator,
        plan: ServerPlan,
        model: ModelBytes,
        optimizer: OptimizerFactory,
        settings: ServerSettings,
        run: str,
        step: int,
    ) -> None:
        """Takes ownership of `comm`: `close` closes it."""
        self.comm = comm
        self.number = comm.rank
        self.plan = plan
        self.step = step
        self.finished = False
        self.run = run
        self.shards: dict[int, ServedShard] = {}
        self.counts = ServerCounts()
        self.worker_bytes = ByteCounts()  # not in `counts`, which the server's thread changes
        self.lost_ranks: list[int] = []
        self.lost_updates: list[LostUpdates] = []
        self.exchange: WorkerExchange
        self._model = model
        self._optimizer = optimizer
        self._settings = settings
        folder = settings.snapshot_folder
        self._snapshots = None if folder is None else ShardSnapshots(folder, run)
        numbers = itertools.count()
        self._ranges = [
            dict(zip(numbers, model.layout.ranges(shard, settings.range_bytes), strict=False))
            for shard in plan.shards
        ]
        self._loop: ServerLoop | None = None
        self._thread: threading.Thread | None = None
        self._thread_error: BaseException | None = None
        for shard in plan.shards_of(self.number):
            self.shards[shard] = self._new_shard(shard, dict.fromkeys(plan.workers, step))

    # ---- forming

    def _new_shard(self, number: int, steps: dict[int, int]) -> ServedShard:
        shard = self.plan.shards[number]
        return ServedShard(
            number,
            self._model.layout,
            self._ranges[number],
            self._model.values[shard.start : shard.stop].clone(),
            self._optimizer,
            lambda: RangeState(steps, staleness=self._settings.staleness),
        )

    def take_over(self, held: dict[int, ServedShard], holders: Sequence[int]) -> None:
        """Sends each shard from the rank that holds it to its server. Collective.

        `held`: the shards that this rank holds from the previous group. `holders`: the rank that
        holds each shard.
        """
        for number, (holder, owner) in enumerate(zip(holders, self.plan.owners, strict=True)):
            length = np.zeros(1, np.int64)
            if self.number == holder:
                packed = pack_shard(held[number].save())
                length[0] = packed.numel()
                if owner == holder:
                    self.shards[number].load(unpack_shard(packed))
                else:
                    self.comm.send(length, owner)
                    self.comm.send(packed, owner)
            elif self.number == owner:
                self.comm.recv(length, holder)
                packed = torch.empty(int(length[0]), dtype=torch.uint8)
                self.comm.recv(packed, holder)
                self.shards[number].load(unpack_shard(packed))
        for number, shard in enumerate(self.plan.shards):
            part = self._model.values[shard.start : shard.stop]
            if number in self.shards:
                part.copy_(self.shards[number].values)
            self.comm.broadcast(part, self.plan.owners[number])

    def start(self, states: Sequence[MemberState], *, in_thread: bool) -> None:
        """Begins to serve this rank's shards, and prepares the messages of this rank's worker."""
        self.comm.timeout_s = _IDLE_S
        ranks = {each.number: rank for rank, each in enumerate(states)}
        finished = {each.number for each in states if each.finished}
        training = {w: ranks[w] for w in self.plan.workers if w not in finished}
        self._loop = ServerLoop(
            self.comm,
            training,
            [ranks[w] for w in self.plan.workers if w in finished],
            list(self.shards.values()),
            self.counts,
            timeout_s=self._settings.timeout_s,
            snapshots=self._snapshots,
            snapshot_every=self._settings.snapshot_every,
        )
        if in_thread and self.shards:
            self._thread_error = None
            self._thread = threading.Thread(
                target=self._serve_in_thread, name="unisono-parameter-server", daemon=True
            )
            self._thread.start()
        if self.number in self.plan.workers:
            self.exchange = WorkerExchange(
                self.comm,
                self._model.layout,
                self.plan,
                self._ranges,
                [ranks[owner] for owner in self.plan.owners],
                self._model.gradients,
                self._model.values,
                self.worker_bytes,
            )

    # ---- serving

    def serve(self) -> None:
        """Serves in the calling thread until all workers have finished."""
        assert self._loop is not None, "start comes first"
        try:
            self._loop.run()
        except CommunicationError:
            raise
        except BaseException as error:
            self.comm.abort(f"the parameter server failed: {type(error).__name__}: {error}")
            raise

    def _serve_in_thread(self) -> None:
        try:
            self.serve()
        except BaseException as error:
            self._thread_error = error

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the server's thread. Raises the error of the thread.

        A communication error of the thread is not raised.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise CollectiveTimeoutError(
                    f"the server of rank {self.number} is still busy: timeout after "
                    f"{timeout_s:g} s: its optimizer or its snapshot takes longer"
                )
            self._thread = None
        error, self._thread_error = self._thread_error, None
        if error is not None and not isinstance(error, CommunicationError):
            raise error

    # ---- after a loss

    def going_on(self, act: Callable[[], None], *, in_thread: bool) -> None:
        """Calls `act`. After each loss of a rank, forms a new group and calls `act` again."""
        while True:
            try:
                act()
                return
            except PeerLostError:
                self._recover(in_thread=in_thread)
            except CommunicationError:
                # raises the error of the server's thread, if any
                self.join(self._settings.timeout_s)
                raise

    def _member_state(self) -> MemberState:
        """Returns this rank's state, which the other ranks need to form a group."""
        newest = [-1] * len(self.plan.shards)
        if self._snapshots is not None:
            newest = [max(self._snapshots.steps(s), default=-1) for s in range(len(newest))]
        return MemberState(
            number=self.number,
            step=self.step,
            finished=self.finished,
            has_state=True,
            shards=[*self.shards],
            snapshots=newest,
            run=self.run,
        )

    def _recover(self, *, in_thread: bool) -> None:
        """Forms a group of the remaining ranks, and a plan for it."""
        self.join(self._settings.timeout_s)
        while True:
            old = self.comm
            self.comm = old.shrink(timeout_s=self._settings.timeout_s)
            old.close()
            self.comm.timeout_s = self._settings.timeout_s
            try:
                states = exchange_states(self.comm, self._member_state())
                break
            except PeerLostError:
                continue  # one more rank was lost
        self._replace_lost(states)
        self.start(states, in_thread=in_thread)

    def _replace_lost(self, states: Sequence[MemberState]) -> None:
        left = [each.number for each in states]
        before = {*self.plan.workers, *self.plan.owners}
        lost = sorted(before - set(left))
        newest = {
            shard: {s.number: s.snapshots[shard] for s in states if s.snapshots[shard] >= 0}
            for shard, owner in enumerate(self.plan.owners)
            if owner in lost
        }
        old = self.plan
        try:
            self.plan = old.without(lost, left, newest)
        except ValueError as error:
            places = [self._model.layout.describe(old.shards[shard]) for shard in newest]
            raise PeerLostError(
                f"ranks {lost} were lost, with the parameters and the optimizer of {places}: "
                f"{error}. Give snapshot_every, and a snapshot_folder that all servers can read"
            ) from None
        self.lost_ranks += lost
        _log.warning("ranks %s were lost; workers %s go on", lost, list(self.plan.workers))
        steps = {s.number: s.step for s in states if s.number in self.plan.workers}
        for shard, owner in enumerate(old.owners):
            if owner in lost:
                self._restore(shard, owner, newest[shard], steps, states)

    def _restore(
        self,
        shard: int,
        lost: int,
        newest: dict[int, int],
        steps: dict[int, int],
        states: Sequence[MemberState],
    ) -> None:
        owner = self.plan.owners[shard]
        found = LostUpdates(
            shard=shard,
            place=self._model.layout.describe(self.plan.shards[shard]),
            lost_server=lost,
            new_server=owner,
            snapshot_step=newest[owner],
            until_step=max(steps.values()),
        )
        self.lost_updates.append(found)
        _log.warning("%s", found)
        if owner == self.number:
            assert self._snapshots is not None, "only ranks with snapshots are chosen"
            training = {s.number: s.step for s in states if s.number in steps and not s.finished}
            self.shards[shard] = self._new_shard(shard, training)
            self.shards[shard].load(self._snapshots.read(shard, newest[owner]))
