"""The loop of a server, which receives pushes of workers, applies them and replies."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from unisono.communicator import Communicator, Work
from unisono.errors import CollectiveTimeoutError
from unisono.parallel.parameter_server.range_state import Action, Apply, Reply
from unisono.parallel.parameter_server.served_shard import Gradient, ServedRange, ServedShard
from unisono.parallel.parameter_server.server_messages import (
    FINISHED,
    Kind,
    Push,
    head_bytes,
    read_head,
    tag_of,
)
from unisono.parallel.parameter_server.shard_snapshots import ShardSnapshots

LATE = "parameter server: timeout"
"""Beginning of the error text of a timeout, by which workers recognize it."""
_LONGEST_WAIT_S = 0.5


@dataclass(slots=True)
class ByteCounts:
    """Bytes of gradients and parameters that a rank sent to and received from other ranks."""

    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(slots=True)
class ServerCounts:
    """Counts of this rank's server; see `ParameterServerStats`."""

    pushes: int = 0
    repeats: int = 0
    updates: int = 0
    delays: int = 0
    most_missed: int = 0
    most_early: int = 0
    bytes: ByteCounts = field(default_factory=ByteCounts)


class ServerLoop:
    """Serves some shards until every worker has finished.

    Call `run` once, in one thread. After a failure, a new `ServerLoop` can serve the same shards.
    """

    def __init__(
        self,
        comm: Communicator,
        ranks: Mapping[int, int],
        finished_ranks: Sequence[int],
        shards: Sequence[ServedShard],
        counts: ServerCounts,
        *,
        timeout_s: float,
        snapshots: ShardSnapshots | None = None,
        snapshot_every: int = 0,
    ) -> None:
        """`ranks`: the rank in `comm` of each worker that still trains.

        At its end, the loop sends a message to these ranks and to `finished_ranks`.
        """
        self._comm = comm
        self._ranks = dict(ranks)
        self._all_ranks = (*ranks.values(), *finished_ranks)
        self._shards = shards
        self._counts = counts
        self._timeout_s = timeout_s
        self._snapshots = snapshots
        self._snapshot_every = snapshot_every
        self._works: list[Work] = []
        self._ends: list[Callable[[], None] | None] = []
        self._unanswered: dict[tuple[int, int, int], float] = {}
        """Time at which each push (shard, worker, step) has arrived that lacks replies."""
        self._replies_left = Counter[tuple[int, int, int]]()
        self._announced: dict[tuple[int, int], deque[Push]] = defaultdict(deque)
        """Pushes that a worker has announced for a range and that have not arrived."""
        self._snapshot_steps = {shard.number: shard.steps for shard in shards}

    def run(self) -> None:
        """Serves until all workers have finished. Raises `PeerLostError` if a rank is lost."""
        for shard in self._shards:
            self._write_first_snapshot(shard)
            workers = list(self._ranks)
            for each in shard.ranges.values():
                self._do(shard, each, each.state.restart(workers))
            for worker in workers:
                self._receive_heads(shard, worker)
        while self._works:
            self._wait_for_one()
        self._say_end()

    # ---- waiting

    def _begin(self, work: Work, end: Callable[[], None] | None = None) -> None:
        self._works.append(work)
        self._ends.append(end)

    def _wait_for_one(self) -> None:
        limit_s = min(self._timeout_s, _LONGEST_WAIT_S)
        try:
            place = Work.wait_any(self._works, limit_s)
        except CollectiveTimeoutError:
            raise
        except TimeoutError:
            self._require_in_time()
            return
        work, end = self._works[place], self._ends[place]
        last_work, last_end = self._works.pop(), self._ends.pop()
        if place < len(self._works):
            self._works[place], self._ends[place] = last_work, last_end
        work.wait()
        if end is not None:
            end()

    def _require_in_time(self) -> None:
        """Raises `CollectiveTimeoutError` if a push has waited too long for its replies.

        Aborts the communicator first, so all ranks raise.
        """
        now_s = time.monotonic()
        for (shard_number, worker, step), since_s in self._unanswered.items():
            if now_s - since_s <= self._timeout_s:
                continue
            shard = next(each for each in self._shards if each.number == shard_number)
            missing = {w for each in shard.ranges.values() for w in each.state.missing()}
            why = f"workers {sorted(missing)} have not pushed theirs"
            if not missing:
                why = "its own gradients have not all arrived"
            text = (
                f"{LATE} after {self._timeout_s:g} s: worker {worker} has waited for the "
                f"parameters after step {step}: {why}"
            )
            self._comm.abort(text)
            raise CollectiveTimeoutError(text)

    # ---- pushes

    def _receive_heads(self, shard: ServedShard, worker: int) -> None:
        head = np.zeros(head_bytes(len(shard.tensors)), np.uint8)
        rank = self._ranks[worker]
        request = self._comm.recv_init(head, rank, tag_of(Kind.HEAD, shard.number))

        def arrived() -> None:
            push = read_head(head)
            if push.step != FINISHED:
                key = (shard.number, worker, push.step)
                self._unanswered[key] = time.monotonic()
                self._replies_left[key] += len(shard.ranges)
            for each in shard.ranges.values():
                self._announce(shard, each, worker, push)
            if push.step != FINISHED:
                self._begin(request.start(), arrived)

        self._begin(request.start(), arrived)

    def _announce(self, shard: ServedShard, served: ServedRange, worker: int, push: Push) -> None:
        """Queues a worker's announced push of a range, or the message that the worker has finished.

        Takes the push at once if the queue was empty.
        """
        announced = self._announced[served.number, worker]
        announced.append(push)
        if len(announced) == 1:
            self._take(shard, served, worker)

    def _take(self, shard: ServedShard, served: ServedRange, worker: int) -> None:
        """Receives the gradient of the first push in the queue of a worker and a range."""
        announced = self._announced[served.number, worker]
        step, used, learning_rate = announced[0]
        if step == FINISHED:
            announced.popleft()
            self._do(shard, served, served.state.remove(worker))
            return
        data = shard.incoming(worker, served.within)
        repeat = served.state.is_repeat(worker, step)
        if repeat:  # must not overwrite the gradient of the first push, maybe not applied yet
            data = torch.empty_like(data)
        rank = self._ranks[worker]
        work = self._comm.recv(data, rank, tag_of(Kind.GRADIENT, served.number), async_op=True)

        def arrived() -> None:
            self._counts.pushes += 1
            self._counts.repeats += repeat
            if rank != self._comm.rank:
                self._counts.bytes.received_bytes += data.numel()
            announced.popleft()
            gradient = Gradient(data, used, learning_rate)
            self._do(shard, served, served.state.push(worker, step, gradient))
            if announced:
                self._take(shard, served, worker)

        self._begin(work, arrived)

    # ---- actions

    def _do(
        self, shard: ServedShard, served: ServedRange, actions: Sequence[Action[Gradient]]
    ) -> None:
        for action in actions:
            if isinstance(action, Apply):
                served.apply([gradient for _, gradient in action.gradients])
                self._counts.updates += 1
                self._counts.delays += action.delay
        for action in actions:
            if isinstance(action, Reply):
                self._reply(shard, served, action)
        self._snapshot(shard)

    def _reply(self, shard: ServedShard, served: ServedRange, reply: Reply) -> None:
        values, rank = served.values, self._ranks[reply.worker]
        repeat = served.state.steps[reply.worker] > reply.step + 1
        if served.state.staleness != 0 or repeat:
            values = values.clone()  # The next update may change the values before they are sent.
        tag = tag_of(Kind.VALUES, served.number)
        self._begin(self._comm.send(values, rank, tag, async_op=True))
        if rank != self._comm.rank:
            self._counts.bytes.sent_bytes += values.numel()
        self._counts.most_missed = max(self._counts.most_missed, reply.missed)
        self._counts.most_early = max(self._counts.most_early, reply.early)
        key = (shard.number, reply.worker, reply.step)
        self._replies_left[key] -= 1
        if not self._replies_left[key]:
            del self._unanswered[key], self._replies_left[key]

    def _write_first_snapshot(self, shard: ServedShard) -> None:
        """Writes a snapshot of a new or moved shard, unless its current step has a snapshot."""
        if self._snapshots is not None and shard.steps not in self._snapshots.steps(shard.number):
            self._snapshots.write(shard.number, shard.steps, shard.save())

    def _snapshot(self, shard: ServedShard) -> None:
        if self._snapshots is None or not self._snapshot_every:
            return
        steps, every = shard.steps, self._snapshot_every
        if steps // every > self._snapshot_steps[shard.number] // every:
            self._snapshot_steps[shard.number] = steps
            self._snapshots.write(shard.number, steps, shard.save())

    def _say_end(self) -> None:
        nothing = np.zeros(1, np.uint8)
        works = [
            self._comm.send(nothing, rank, tag_of(Kind.END, shard.number), async_op=True)
            for shard in self._shards
            for rank in self._all_ranks
        ]
        Work.wait_all(works, self._timeout_s)
