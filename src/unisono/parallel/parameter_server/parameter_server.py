"""Training with a parameter server, which holds the parameters and the optimizer."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from types import TracebackType

from torch import nn

from unisono.communicator import Communicator, init
from unisono.parallel.parameter_server.member_state import (
    LostUpdates,
    MemberState,
    exchange_states,
    require_equal_settings,
)
from unisono.parallel.parameter_server.model_bytes import ModelBytes
from unisono.parallel.parameter_server.served_shard import OptimizerFactory
from unisono.parallel.parameter_server.server_group import ServerGroup, ServerSettings
from unisono.parallel.parameter_server.server_messages import Push
from unisono.parallel.parameter_server.server_plan import ServerPlan, choose_servers
from unisono.torch_backend import default_communicator

_RANGES = 64
_LEAST_RANGE_BYTES, _MOST_RANGE_BYTES = 1 << 16, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterServerStats:
    """Counts of this rank so far. Bytes are those of gradients and parameters between ranks."""

    steps: int
    """Number of steps that this rank has completed as a worker."""
    sent_bytes: int
    received_bytes: int
    pushes: int
    """Number of pushes to this rank's server, each the gradient of one range. Repeats count too."""
    repeats: int
    """Number of repeated pushes, which changed nothing."""
    updates: int
    """Number of optimizer steps of this rank's server, counted for each range."""
    mean_delay: float
    """Mean number of other workers' updates between a worker's read of the values and its own
    update; 0 if synchronous.
    """
    most_missed: int
    """Largest number of gradients that were missing in values sent to a worker. Counts the other
    workers' gradients of the worker's own step and of earlier steps."""
    most_early: int
    """Largest number of gradients of later steps that values sent to a worker already contained.
    Counts the other workers' gradients of steps after the worker's own step."""
    lost_ranks: tuple[int, ...]
    lost_updates: tuple[LostUpdates, ...]
    """Shards whose server was lost, each with the steps that are missing in its snapshot."""


class ParameterServer:
    """Servers that hold the parameters and the optimizer; workers push gradients and pull values.

    Each of the S servers holds an equal share of the parameters' bytes. A worker's `step` pushes
    its gradients to all servers, which take a step of the optimizer and send the new parameters
    back (Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014).
    With one server, on a worker's rank, this is the scheme in which the first GPU gathers all
    gradients and sends the parameters back.

    **Synchronous** training (`staleness=0`) applies the mean of all workers' gradients of a step.
    The gradients are added in rank order, so the mean equals in all bits `all_reduce(op="avg")` of
    a communicator with `reproducible=True`. The mean divides by the number of gradients in its sum,
    so a worker that was lost or has finished no longer counts. **Asynchronous** training applies
    each gradient when it arrives, undivided. With `staleness=s`, a worker that is more than s steps
    ahead of the slowest worker waits.

    **Optimizer.** Each range of `range_bytes` has an optimizer of its own, so the optimizer must
    compute each element separately, as SGD, Adam and AdamW do. Norms over all parameters are not
    possible on the server: clip before `step`.

    **Loss of a rank.** The other ranks continue. A lost server's shard comes from its newest
    snapshot; see `ParameterServerStats.lost_updates`, and the log `unisono.parallel`.

    **Arguments.** `model`: the same on all ranks, also on dedicated servers. It starts with the
    values of rank 0. `optimizer`: makes an optimizer for a list of (name, piece of a parameter).
    `comm`: as in `data_parallel`; the parameter server makes a communicator of its own from it.
    `servers`: the number of servers, or their ranks. `dedicated`: True if servers are not workers
    too; otherwise they serve in a second thread, which shares the interpreter with the worker.
    `range_bytes`: the size of a message; None: a 64th of a shard, from 64 KiB to 1 MiB.
    `staleness`: 0 is synchronous, None sets no bound. `snapshot_every`: steps between two snapshots
    of a shard; 0 makes none. `snapshot_folder`: a folder that all servers can read.

    `previous`: an ended parameter server over other ranks, on each rank that has one; a new rank
    passes None. The parameters, optimizers and number of steps come from `previous`, so ranks can
    be replaced. The number of servers must be the same.

    >>> import torch, unisono
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> model.weight = torch.nn.Parameter(torch.ones(1, 2))
    >>> with (
    ...     unisono.init(rank=0, size=1, rendezvous="example of a parameter server") as comm,
    ...     ParameterServer(model, lambda params: torch.optim.SGD(params, 0.5), comm=comm) as ps,
    ... ):
    ...     model(torch.tensor([[1.0, 2.0]])).sum().backward()
    ...     ps.step()
    >>> model.weight.tolist()
    [[0.5, 0.0]]
    """

    _group: ServerGroup

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerFactory,
        *,
        comm: Communicator | None = None,
        servers: int | Sequence[int] = 1,
        dedicated: bool = False,
        staleness: int | None = 0,
        range_bytes: int | None = None,
        snapshot_every: int = 0,
        snapshot_folder: Path | str | None = None,
        previous: ParameterServer | None = None,
    ) -> None:
        """Forms the group. Collective over all ranks, which pass equal arguments (see the class).

        Raises `ValueError` for wrong arguments, or arguments that differ between ranks.
        """
        _require_arguments(staleness, range_bytes, snapshot_every, snapshot_folder)
        self._model = ModelBytes(model)
        self._own_comm: Communicator | None = None
        found = comm or default_communicator()
        if found is None:
            found = self._own_comm = init()
        plan = _make_plan(self._model, found.size, servers, dedicated=dedicated)
        self._settings = ServerSettings(
            staleness=staleness,
            range_bytes=range_bytes or _range_bytes(self._model.layout.nbytes // len(plan.owners)),
            snapshot_every=snapshot_every,
            snapshot_folder=None if snapshot_folder is None else Path(snapshot_folder),
            timeout_s=found.timeout_s,
        )
        self._closed = False
        self._learning_rate = nan
        own = found.split(0, found.rank)
        assert own is not None, "all ranks have color 0"
        try:
            self._form(own, plan, optimizer, previous)
        except BaseException:
            own.close()
            raise

    def _form(
        self,
        comm: Communicator,
        plan: ServerPlan,
        optimizer: OptimizerFactory,
        previous: ParameterServer | None,
    ) -> None:
        before = None if previous is None else previous._group
        held = {} if before is None else before.shards
        mine = MemberState(
            number=comm.rank,
            step=0 if before is None else before.step,
            has_state=before is not None,
            shards=[*held],
            run=secrets.token_hex(4) if before is None else before.run,
            settings=self._settings_to_compare(plan),
        )
        states = exchange_states(comm, mine)
        require_equal_settings(states)
        sources = [rank for rank, each in enumerate(states) if each.has_state]
        root = sources[0] if sources else 0
        step = max(each.step for each in states)
        self._model.pack_values()
        for tensor in (self._model.values, *self._model.rest):
            comm.broadcast(tensor.detach(), root)
        try:
            self._group = ServerGroup(
                comm, plan, self._model, optimizer, self._settings, states[root].run, step
            )
        except Exception as error:  # of `optimizer`, which only servers call
            comm.abort(f"rank {comm.rank}, a server: {type(error).__name__}: {error}")
            raise
        if sources:
            self._group.take_over(held, _holders(states, len(plan.shards)))
        self._model.unpack_values()
        self._group.start(states, in_thread=self.is_worker)

    def _settings_to_compare(self, plan: ServerPlan) -> dict[str, object]:
        layout = self._model.layout
        return {
            "servers": list(plan.owners),
            "workers": list(plan.workers),
            "staleness": self._settings.staleness,
            "range_bytes": self._settings.range_bytes,
            "snapshot_every": self._settings.snapshot_every,
            "model": [f"{each.name}: {each.count} {each.dtype}" for each in layout.tensors],
        }

    # ---- roles

    @property
    def is_worker(self) -> bool:
        """True if this rank is a worker, which calls `step`."""
        return self._group.number in self._group.plan.workers

    @property
    def is_server(self) -> bool:
        """True if this rank serves a shard."""
        return bool(self._group.shards)

    @property
    def plan(self) -> ServerPlan:
        """The workers, and the server of each shard. It changes when a rank is lost."""
        return self._group.plan

    # ---- training

    def step(self) -> None:
        """Pushes the gradients of the model, and waits for new parameters as `staleness` requires.

        The gradients of the model do not change. A missing gradient of a worker counts as zeros. If
        no worker has a gradient for a parameter, the parameter keeps its value and its optimizer
        state. If a rank is lost, the remaining ranks repeat the step, as soon as each of them has
        called `step`.

        Raises `CollectiveTimeoutError`, which names the late workers, after the communicator's
        timeout; `PeerLostError` if a server without a snapshot was lost; `AbortedError` if another
        rank failed; and the error of this rank's own server.
        """
        self._require_worker("step")
        group = self._group
        used = self._model.pack_gradients()

        def exchange() -> None:
            push = Push(group.step, used, self._learning_rate)
            group.exchange.exchange(push, self._settings.timeout_s)

        group.going_on(exchange, in_thread=True)
        self._model.unpack_values()
        group.step += 1

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the learning rate of all groups of the optimizers, from this worker's next step on.

        In synchronous training all workers set the same value before the same step; otherwise the
        step fails on all ranks. In asynchronous training it applies to this worker's gradients. A
        worker that has set none leaves the learning rate as it is.
        """
        self._require_worker("set_learning_rate")
        if not 0 <= learning_rate < inf:
            raise ValueError(f"learning_rate: expected 0 or more, found {learning_rate}")
        self._learning_rate = float(learning_rate)

    def zero_grad(self) -> None:
        """Sets the gradients of the model to None."""
        self._model.clear_gradients()

    def serve(self) -> None:
        """Serves on a dedicated server's rank until all workers have finished.

        Continues after the loss of a rank, as `step` does. Raises `ValueError` on a worker's rank,
        whose server runs in a thread.
        """
        self._require_open()
        if self.is_worker:
            raise ValueError(
                f"serve: rank {self._group.number} is a worker, which serves in a thread; expected "
                f"a dedicated server"
            )
        self._group.going_on(self._group.serve, in_thread=False)

    def stats(self) -> ParameterServerStats:
        """Returns the counts of this rank since this parameter server was made."""
        group, counts = self._group, self._group.counts
        return ParameterServerStats(
            steps=group.step,
            sent_bytes=counts.bytes.sent_bytes + group.worker_bytes.sent_bytes,
            received_bytes=counts.bytes.received_bytes + group.worker_bytes.received_bytes,
            pushes=counts.pushes,
            repeats=counts.repeats,
            updates=counts.updates,
            mean_delay=counts.delays / max(counts.updates, 1),
            most_missed=counts.most_missed,
            most_early=counts.most_early,
            lost_ranks=tuple(group.lost_ranks),
            lost_updates=tuple(group.lost_updates),
        )

    # ---- end

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the work of this rank; a second call does nothing.

        A worker waits until all workers have called `close`, since this rank's server may be needed
        until then. After `timeout_s` seconds (None: the communicator's timeout) it raises
        `CollectiveTimeoutError`. Means of gradients no longer count this worker.
        """
        if self._closed:
            return
        self._closed = True
        limit_s = self._settings.timeout_s if timeout_s is None else timeout_s
        group = self._group
        try:
            if self.is_worker:
                known = False

                def finish() -> None:
                    nonlocal known
                    said, known, group.finished = known, True, True
                    group.exchange.finish(limit_s, known=said)
                    group.join(limit_s)

                group.going_on(finish, in_thread=True)
        finally:
            self._leave()

    def _leave(self) -> None:
        with suppress(Exception):  # the caller already raises an earlier error
            self._group.join(self._settings.timeout_s)
        self._group.comm.close()
        if self._own_comm is not None:
            self._own_comm.close()

    def __enter__(self) -> ParameterServer:
        self._require_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._group.comm.abort(f"{type(error).__name__}: {error}")
            self._leave()

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("this parameter server is closed: make a new one")

    def _require_worker(self, call: str) -> None:
        self._require_open()
        if not self.is_worker:
            raise ValueError(
                f"{call}: rank {self._group.number} is a dedicated server; expected a worker. Call "
                "serve() on it"
            )


def _require_arguments(
    staleness: int | None, range_bytes: int | None, snapshot_every: int, folder: Path | str | None
) -> None:
    if staleness is not None and staleness < 0:
        raise ValueError(f"staleness: expected None or 0 and more, found {staleness}")
    if range_bytes is not None and range_bytes < 1:
        raise ValueError(f"range_bytes: expected 1 and more, found {range_bytes}")
    if snapshot_every < 0 or bool(snapshot_every) != (folder is not None):
        raise ValueError(
            "snapshot_every and snapshot_folder: expected both or none, found "
            f"{snapshot_every} and {folder}"
        )


def _make_plan(
    model: ModelBytes, ranks: int, servers: int | Sequence[int], *, dedicated: bool
) -> ServerPlan:
    owners = choose_servers(ranks, servers, dedicated=dedicated)
    workers = tuple(rank for rank in range(ranks) if not dedicated or rank not in owners)
    shards = model.layout.divide(model.layout.whole, len(owners))
    return ServerPlan(workers=workers, owners=owners, shards=shards)


def _range_bytes(shard_bytes: int) -> int:
    """Returns the size of a range. Ranges are small, so that a server can receive one range
    while it sums or sends another."""
    return min(max(shard_bytes // _RANGES, _LEAST_RANGE_BYTES), _MOST_RANGE_BYTES)


def _holders(states: Sequence[MemberState], shards: int) -> list[int]:
    """Returns the rank that holds each shard. Raises `ValueError` if no rank holds a shard."""
    found = []
    for shard in range(shards):
        holders = [rank for rank, each in enumerate(states) if shard in each.shards]
        if not holders:
            raise ValueError(
                f"previous: expected a rank that holds shard {shard} of {shards}, found none: give "
                "the previous parameter server on every rank that has one"
            )
        found.append(holders[0])
    return found
