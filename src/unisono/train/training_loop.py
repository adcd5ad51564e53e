"""The training loop of one rank, like that of an ordinary data-parallel program."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from unisono.train import communication, events
from unisono.train.replicas import make_replica
from unisono.train.settings import TrainingRun
from unisono.train.task import Task

_REPORT_INTERVAL_S = 0.1

Emit = Callable[[events.Event], None]
Batch = Sequence[torch.Tensor]


def train(
    run: TrainingRun, task: Task, groups: Mapping[str, dist.ProcessGroup], emit: Emit
) -> None:
    """Trains a model on each backend's group, scores it, and measures the communication.

    Collective over the default group.

    The backends alternate, so that changes of the machine's speed affect all backends equally.
    """
    torch.set_num_threads(1)
    trainers = [Trainer(run, task, backend, group, emit) for backend, group in groups.items()]
    emit(trainers[0].started())
    for period in range(run.periods):
        for trainer in trainers if period % 2 == 0 else reversed(trainers):
            trainer.train_period(period)
    emit(events.Measuring())
    measured = communication.measure(
        [trainer.replica for trainer in trainers],
        task,
        next(iter(trainers[0].loader)),
        run.measured_groups,
    )
    for trainer, measurement in zip(trainers, measured, strict=True):
        emit(trainer.finished(measurement))
        trainer.replica.close()


@dataclass(slots=True)
class Curve:
    """Losses (means over ranks) and times of the steps so far."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)


class Trainer:
    """Model, data shard and optimizer of one rank, on one backend."""

    def __init__(
        self, run: TrainingRun, task: Task, backend: str, group: dist.ProcessGroup, emit: Emit
    ) -> None:
        self.run = run
        self.task = task
        self.backend = backend
        self.emit = emit
        self.curve = Curve()
        torch.manual_seed(run.seed)
        self.replica = make_replica(backend, task.model(), group)
        # DistributedSampler makes disjoint shards of equal length.
        self.sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
            task.train_set, seed=run.seed, drop_last=True
        )
        self.loader: DataLoader[Batch] = DataLoader(
            task.train_set,
            batch_size=run.batch,
            sampler=self.sampler,
            drop_last=True,
        )
        self.steps_per_period = run.steps_per_period or len(self.loader)
        if not 0 < self.steps_per_period <= len(self.loader):
            raise ValueError(
                f"steps_per_period: expected 1 to {len(self.loader)} for batches of {run.batch}"
            )
        self.total_steps = run.periods * self.steps_per_period
        self.optimizer = task.optimizer(self.replica.module, run.learning_rate)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer,
            run.learning_rate,
            self.total_steps,
            pct_start=0.15,
            cycle_momentum=False,
        )
        self._reported_s = 0.0

    def started(self) -> events.Started:
        return events.Started(
            total_steps=self.total_steps,
            parameters=sum(parameter.numel() for parameter in self.replica.module.parameters()),
        )

    def train_period(self, period: int) -> None:
        """Runs one period of steps, then computes mean losses and the score without timing them."""
        self.sampler.set_epoch(period)
        # Augmentation differs between ranks and periods, but not between backends.
        period_index = self.run.seed * self.run.periods + period
        torch.manual_seed(period_index * dist.get_world_size() + dist.get_rank())
        own_losses = []
        for loss, elapsed_s in self._timed_steps():
            own_losses.append(loss)
            self.curve.step_s.append(elapsed_s)
            self._report_step(loss)
        # One all_reduce for all losses of the period: an all_reduce in each step would slow it.
        mean = torch.tensor(own_losses, dtype=torch.float64) / dist.get_world_size()
        dist.all_reduce(mean, group=self.replica.group)
        self.curve.losses.extend(mean.tolist())
        self.emit(events.Scored(backend=self.backend, period=period + 1, score=self.score()))

    def _timed_steps(self) -> Iterator[tuple[float, float]]:
        start_s = time.perf_counter()
        for batch in itertools.islice(self.loader, self.steps_per_period):
            loss = self._step(batch)
            elapsed_s = time.perf_counter() - start_s
            yield loss, elapsed_s
            start_s = time.perf_counter()

    def _step(self, batch: Batch) -> float:
        self.optimizer.zero_grad()
        loss = self.task.loss(self.replica.wrapped, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def _report_step(self, loss: float) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s >= _REPORT_INTERVAL_S:
            self._reported_s = now_s
            self.emit(events.Stepped(backend=self.backend, step=len(self.curve.step_s), loss=loss))

    def score(self) -> float:
        """Returns the current model's score on unseen data; every rank scores its share."""
        self.replica.module.eval()
        with torch.no_grad():
            share = self.task.score(self.replica.module, dist.get_rank(), dist.get_world_size())
        self.replica.module.train()
        total = torch.tensor(share, dtype=torch.float64)
        dist.all_reduce(total, group=self.replica.group)
        return float(total[0] / total[1])

    def finished(self, measured: communication.Communication) -> events.BackendFinished:
        return events.BackendFinished(
            backend=self.backend,
            score=self.score(),
            losses=self.curve.losses,
            step_s=self.curve.step_s,
            same_parameters=self._same_on_all_ranks(),
            sample=self._sample(),
            **asdict(measured),
        )

    def _sample(self) -> str:
        """Returns a sample of the model's output on rank 0, and an empty text on other ranks."""
        if dist.get_rank() != 0:
            return ""
        self.replica.module.eval()
        with torch.no_grad():
            return self.task.sample(self.replica.module)

    def _same_on_all_ranks(self) -> bool:
        """Returns True if the model has the same bits on every rank."""
        vector = nn.utils.parameters_to_vector(self.replica.module.parameters())
        bits = vector.detach().view(torch.int32)
        lowest, highest = bits.clone(), bits.clone()
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self.replica.group)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.replica.group)
        return bool((lowest == highest).all())
