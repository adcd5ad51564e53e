"""The table of pipeline schedules: what each one needs, keeps in memory and wastes.

A pipeline has p ranks, m microbatches, and v stages ("chunks") on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from unisono.pipeline.task_order import (
    PipelineSize,
    gpipe_order,
    one_forward_one_backward_order,
    zero_bubble_order,
)
from unisono.pipeline.task_simulation import StageTask, TaskGroup


class TorchSchedule(NamedTuple):
    """A class of `torch.distributed.pipelining`, and the microbatches that it needs."""

    name: str
    least_rounds: int = 0
    """m is at least this number x p."""
    whole_rounds: bool = False
    """True if m must be a multiple of m // p."""


@dataclass(frozen=True, kw_only=True)
class ScheduleRules:
    """The rules of one schedule."""

    single: TorchSchedule | None = None
    """Torch's class for one stage on a rank; None: the same as `several`."""
    several: TorchSchedule
    """Torch's class that takes a list of a rank's stages."""
    chunks: int | None = None
    """v that the planner predicts; None: any."""
    least_chunks: int = 1
    """Smallest v in a pipeline of several ranks."""
    is_v: bool = False
    """True if a rank holds one stage from each end of the model."""
    least_rounds: int = 0
    """m is at least this number x p."""
    hides_exchanges: bool = False
    """True if a rank computes one microbatch while it exchanges the tokens of another one."""
    bubble: Callable[[PipelineSize, float], float]
    """Bubble, divided by the sum of a microbatch's times on all ranks except the slowest. The
    second argument is 1 if the backward pass computes the forward pass again, and otherwise 0."""
    order: Callable[[PipelineSize, int], list[StageTask]] | None = None
    """Tasks of a rank (the second argument), in order. None: only torch's class knows it."""
    kept: Callable[[PipelineSize, int], int]
    """Most chunks whose activations a rank (the second argument) keeps at once. Each is one stage
    in one microbatch."""

    def torch_schedule(self, chunks: int) -> TorchSchedule:
        """Returns torch's class for a number of stages on a rank."""
        return self.single if self.single is not None and chunks == 1 else self.several


def _whole_bubble(size: PipelineSize, again: float) -> float:
    """1F1B and GPipe wait for one microbatch on each other rank, and interleaving for a v-th."""
    return 1 / size.chunks


def _zb1p_bubble(size: PipelineSize, again: float) -> float:
    """F + I - W out of F + I + W, if all three take equal times and I includes recomputation."""
    return (1 + again) / (3 + again)


def _zbv_bubble(size: PipelineSize, again: float) -> float:
    """Half of F, because all ranks wait for a common end (arXiv 2401.10241). Up to twice as long if
    the microbatches do not fill the pipeline, as in torch's order of the tasks."""
    few = 0.0
    if size.ranks > 1:
        few = 2 - 2 * (size.microbatches - size.ranks) / (size.ranks - 1)
    return max(1.0, few) * 0.5 / (3 + again)


def _dualpipev_bubble(size: PipelineSize, again: float) -> float:
    """F&B + B - 3 W of a chunk (github deepseek-ai/DualPipe), with F&B = F + B."""
    return (2 + 2 * again) / (2 * (3 + again))


def _kept_1f1b(size: PipelineSize, rank: int) -> int:
    """1F1B: min(m, p - rank). Interleaved: p v + p - 1 - 2 rank (Megatron-LM's warm-up)."""
    p, v, microbatches = size
    if v == 1:
        return min(microbatches, p - rank)
    return min(microbatches * v, p * v + p - 1 - 2 * rank) if p > 1 else v


_INTERLEAVED = TorchSchedule("ScheduleInterleaved1F1B", whole_rounds=True)
SCHEDULES: Mapping[str, ScheduleRules] = MappingProxyType(
    {
        "1f1b": ScheduleRules(
            # Narayanan et al., arXiv 2104.04473
            single=TorchSchedule("Schedule1F1B", least_rounds=1),
            several=_INTERLEAVED,
            order=one_forward_one_backward_order,
            bubble=_whole_bubble,
            kept=_kept_1f1b,
        ),
        "gpipe": ScheduleRules(
            # Huang et al., 2019
            single=TorchSchedule("ScheduleGPipe"),
            several=TorchSchedule("ScheduleLoopedBFS"),
            chunks=1,
            order=gpipe_order,
            bubble=_whole_bubble,
            kept=lambda size, rank: size.microbatches * size.chunks,
        ),
        "interleaved": ScheduleRules(
            several=_INTERLEAVED,
            least_chunks=2,
            order=one_forward_one_backward_order,
            bubble=_whole_bubble,
            kept=_kept_1f1b,
        ),
        "zb1p": ScheduleRules(
            # Qi et al., arXiv 2401.10241, ZB-H1
            several=TorchSchedule("ScheduleInterleavedZeroBubble", whole_rounds=True),
            chunks=1,
            order=zero_bubble_order,
            bubble=_zb1p_bubble,
            kept=lambda size, rank: min(size.microbatches, size.ranks),
        ),
        # 2 p half chunks (arXiv 2401.10241, 2405.15362), and one more for DualPipeV.
        "zbv": ScheduleRules(
            several=TorchSchedule("ScheduleZBVZeroBubble", least_rounds=1),
            chunks=2,
            is_v=True,
            bubble=_zbv_bubble,
            kept=lambda size, rank: min(size.microbatches, size.ranks) * size.chunks,
        ),
        "dualpipev": ScheduleRules(
            several=TorchSchedule("ScheduleDualPipeV"),
            chunks=2,
            is_v=True,
            least_rounds=2,
            hides_exchanges=True,
            bubble=_dualpipev_bubble,
            kept=lambda size, rank: min(
                size.microbatches * size.chunks, size.ranks * size.chunks + 1
            ),
        ),
    }
)
"""Pipeline schedules by name. With `vpp` over 1, "1f1b" is the interleaved schedule."""


def stage_tasks(
    schedule: str, *, stages: int, microbatches: int, chunks: int = 1
) -> list[list[TaskGroup]]:
    """Returns the tasks of each rank in their order, one in each group. A rank has `chunks` stages
    of the model: rank r has the stages r, r + `stages`, ...

    Raises ValueError for a schedule whose order only torch knows, and for interleaving if
    `microbatches` is not a multiple of `stages`.

    >>> [task.text for (task,) in stage_tasks("1f1b", stages=2, microbatches=3)[0]]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    """
    order = SCHEDULES[schedule].order if schedule in SCHEDULES else None
    if order is None:
        raise ValueError(f"no order of tasks is known for the schedule {schedule!r}")
    if chunks > 1 and microbatches % stages:
        raise ValueError(
            f"interleaving needs a multiple of {stages} microbatches, not {microbatches}"
        )
    size = PipelineSize(stages, chunks, microbatches)
    return [[(task,) for task in order(size, rank)] for rank in range(stages)]
