"""The training loop of one rank: DistributedDataParallel as anybody would use it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from unisono.train import communication, events
from unisono.train.settings import Run
from unisono.train.task import Task

_REPORT_INTERVAL_S = 0.1

Emit = Callable[[events.Event], None]
Batch = Sequence[torch.Tensor]


def train(run: Run, task: Task, emit: Emit) -> None:
    """Train, judge, measure. Collective over the default process group."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    trainer = Trainer(run, task, emit)
    for period in range(run.periods):
        trainer.train_period(period)
    score = trainer.score()
    emit(events.Measuring())
    batch = next(iter(trainer.loader))
    measured = communication.measure(trainer.ddp, task, batch, run.measured_groups)
    emit(
        events.Finished(
            score=score,
            losses=trainer.curve.losses,
            step_s=trainer.curve.step_s,
            same_parameters=_same_on_all_ranks(trainer.ddp.module),
            sample=trainer.sample(),
            **asdict(measured),
        )
    )


@dataclass(slots=True)
class Curve:
    """What the steps so far were like."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)


class Trainer:
    """Model, data shard and optimiser of one rank."""

    def __init__(self, run: Run, task: Task, emit: Emit) -> None:
        self.run = run
        self.task = task
        self.emit = emit
        self.curve = Curve()
        self.ddp = DistributedDataParallel(task.model())
        # All ranks now hold one model; what is random from here on differs between them.
        torch.manual_seed(run.seed * dist.get_world_size() + dist.get_rank())
        # DistributedSampler makes the shards disjoint, and equal in length.
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
            raise ValueError(f"a shard has {len(self.loader)} batches of {run.batch} samples")
        total_steps = run.periods * self.steps_per_period
        self.optimizer = task.optimizer(self.ddp.module, run.learning_rate)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, run.learning_rate, total_steps, pct_start=0.15, cycle_momentum=False
        )
        self._reported_s = 0.0
        emit(
            events.Started(
                total_steps=total_steps,
                parameters=sum(parameter.numel() for parameter in self.ddp.parameters()),
                samples_per_step=run.batch * dist.get_world_size(),
            )
        )

    def train_period(self, period: int) -> None:
        """One stretch of steps, then the mean losses and the score, which are not timed."""
        self.sampler.set_epoch(period)
        own_losses = []
        for loss, elapsed_s in self._timed_steps():
            own_losses.append(loss)
            self.curve.step_s.append(elapsed_s)
            self._report_step(loss)
        # One collective for many steps: asking after each step would slow the step.
        mean = torch.tensor(own_losses, dtype=torch.float64) / dist.get_world_size()
        dist.all_reduce(mean)
        self.curve.losses.extend(mean.tolist())
        self.emit(events.Scored(period=period + 1, score=self.score()))

    def _timed_steps(self) -> Iterator[tuple[float, float]]:
        start_s = time.perf_counter()
        for batch in itertools.islice(self.loader, self.steps_per_period):
            loss = self._step(batch)
            elapsed_s = time.perf_counter() - start_s
            yield loss, elapsed_s
            start_s = time.perf_counter()

    def _step(self, batch: Batch) -> float:
        self.optimizer.zero_grad()
        loss = self.task.loss(self.ddp, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def _report_step(self, loss: float) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s >= _REPORT_INTERVAL_S:
            self._reported_s = now_s
            self.emit(events.Stepped(step=len(self.curve.step_s), loss=loss))

    def score(self) -> float:
        """Of the model as it is now, on unseen data; every rank judges its share."""
        self.ddp.module.eval()
        with torch.no_grad():
            share = self.task.score(self.ddp.module, dist.get_rank(), dist.get_world_size())
        self.ddp.module.train()
        total = torch.tensor(share, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def sample(self) -> str:
        """On rank 0 only; the others have the same model and nobody to show it to."""
        if dist.get_rank() != 0:
            return ""
        self.ddp.module.eval()
        with torch.no_grad():
            return self.task.sample(self.ddp.module)


def _same_on_all_ranks(model: nn.Module) -> bool:
    """Whether every rank holds the same bits."""
    bits = nn.utils.parameters_to_vector(model.parameters()).detach().view(torch.int32)
    lowest, highest = bits.clone(), bits.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return bool((lowest == highest).all())
