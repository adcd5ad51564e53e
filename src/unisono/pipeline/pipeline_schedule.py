"""A pipeline schedule as data: passes in order, their times, and messages between stages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from unisono.pipeline.task_simulation import StageTask, TaskGroup, run_tasks
from unisono.text_files import reading

ACTIVATION, GRADIENT = "activation", "gradient"
_LISTS = ("stages", "messages", "ranks")
_MESSAGE = ("kind", "from_stage", "to_stage", "bytes")
_TASK = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of the passes of one microbatch through a stage. Raises ValueError for other
    values."""

    forward_s: float
    input_gradient_s: float
    weight_gradient_s: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _check_number(f"{name} must be a number of seconds", value)

    def of(self, kind: str) -> float:
        """Returns the seconds of a forward pass "F", a whole backward pass "B", an input gradient
        "I" or a weight gradient "W"."""
        return {
            "F": self.forward_s,
            "B": self.input_gradient_s + self.weight_gradient_s,
            "I": self.input_gradient_s,
            "W": self.weight_gradient_s,
        }[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMessage:
    """A message that one stage sends to another for each microbatch.

    An activation leaves after a forward pass. A gradient leaves after a whole backward pass or
    after an input gradient. Raises ValueError for another kind, and for stages that are not
    neighbours.
    """

    kind: str
    """One of "activation" and "gradient"."""
    from_stage: int
    to_stage: int
    nbytes: float

    def __post_init__(self) -> None:
        step = {ACTIVATION: 1, GRADIENT: -1}.get(self.kind)
        if step is None:
            raise ValueError(f"a message is an activation or a gradient, not {self.kind!r}")
        if (self.to_stage - self.from_stage) != step:
            raise ValueError(
                f"the {self.kind} of stage {self.from_stage} goes to stage "
                f"{self.from_stage + step}, not {self.to_stage}"
            )
        _check_number("bytes must be a number", self.nbytes)


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """A pipeline schedule: the passes of each rank in order, with times and messages.

    Two stages without a message exchange their values without bytes and in no time. Raises
    ValueError for passes that are missing, repeated or in an order that cannot run.

    >>> orders = [[(StageTask(kind, 0, stage),) for kind in "FB"] for stage in (0, 1)]
    >>> schedule = PipelineSchedule.of("1f1b", orders, forward_s=1.0, backward_s=2.0)
    >>> schedule.to_document()["ranks"]
    [['0F0', '0B0'], ['1F0', '1B0']]
    >>> PipelineSchedule.from_document(schedule.to_document()) == schedule
    True
    """

    name: str
    stages: tuple[StageTimes, ...]
    """Times of each stage."""
    messages: tuple[StageMessage, ...]
    ranks: tuple[tuple[TaskGroup, ...], ...]
    """Actions of each rank, in order. An action has one or several passes."""

    def __post_init__(self) -> None:
        _check_passes(self.ranks, len(self.stages))
        pairs = [(each.kind, each.from_stage) for each in self.messages]
        for kind, stage in pairs:
            last = len(self.stages) - 1
            if not (0 <= stage < last if kind == ACTIVATION else 0 < stage <= last):
                raise ValueError(f"stage {stage} of {len(self.stages)} stages sends no {kind}")
            if pairs.count((kind, stage)) > 1:
                raise ValueError(f"the {kind} of stage {stage} is listed twice")
        run_tasks(self.ranks, self.seconds)  # raises an error if passes wait for each other

    @classmethod
    def of(
        cls,
        name: str,
        ranks: Sequence[Sequence[TaskGroup]],
        *,
        forward_s: float,
        backward_s: float,
        weight_share: float = 0.5,
        activation_bytes: float = 0.0,
    ) -> PipelineSchedule:
        """Returns the schedule with equal times of all stages and equal messages.

        `forward_s` and `backward_s` are the seconds of one microbatch through one stage.
        `weight_share` is the fraction of `backward_s` in which weight gradients are computed. A
        gradient has as many bytes as an activation.
        """
        count = 1 + max(task.stage for task in _tasks(ranks))
        weight_s = backward_s * weight_share
        times = StageTimes(
            forward_s=forward_s,
            input_gradient_s=backward_s - weight_s,
            weight_gradient_s=weight_s,
        )
        pairs = [(ACTIVATION, i, i + 1) for i in range(count - 1)]
        pairs += [(GRADIENT, i + 1, i) for i in range(count - 1)]
        return cls(
            name=name,
            stages=(times,) * count,
            messages=tuple(
                StageMessage(kind=kind, from_stage=a, to_stage=b, nbytes=activation_bytes)
                for kind, a, b in pairs
            ),
            ranks=tuple(tuple(map(tuple, order)) for order in ranks),
        )

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a step."""
        return 1 + max(task.microbatch for task in _tasks(self.ranks))

    def seconds(self, task: StageTask) -> float:
        """Returns the seconds of a pass."""
        return self.stages[task.stage].of(task.kind)

    def message_bytes(self, kind: str, from_stage: int) -> float:
        """Returns the bytes that a stage sends for each microbatch; 0 without a message."""
        found = (m.nbytes for m in self.messages if (m.kind, m.from_stage) == (kind, from_stage))
        return next(found, 0.0)

    def save(self, path: str | Path) -> None:
        """Writes the schedule to a JSON file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """Returns the schedule as JSON, with one line for each stage, message and rank."""
        document = self.to_document()
        lists = [f'  "{name}": {_lines(document[name])}' for name in _LISTS]
        text = ",\n".join([f'  "pipeline": {json.dumps(self.name)}', *lists])
        return f"{{\n{text}\n}}\n"

    @classmethod
    def load(cls, path: str | Path) -> PipelineSchedule:
        """Reads a schedule from a JSON file that `save` wrote. Raises ValueError for another
        file."""
        with reading(Path(path)) as text:
            return cls.from_document(json.loads(text))

    def to_document(self) -> dict[str, Any]:
        """Returns the schedule as a JSON object. Passes are in torch's notation: "1F0" is the
        forward pass (F) of microbatch 0 through stage 1. A list of passes is one action: the rank
        waits for the inputs of all its passes first, and sends all results at the end."""
        return {
            "pipeline": self.name,
            "stages": [asdict(each) for each in self.stages],
            "messages": [
                dict(zip(_MESSAGE, asdict(each).values(), strict=True)) for each in self.messages
            ],
            "ranks": [[_group_text(group) for group in order] for order in self.ranks],
        }

    @classmethod
    def from_document(cls, document: Any) -> PipelineSchedule:
        """Returns the schedule of a JSON object. Raises ValueError for another object."""
        _check_fields("a pipeline schedule", document, ("pipeline", *_LISTS))
        for name in _LISTS:
            if not isinstance(document[name], list):
                raise ValueError(f"{name} must be a list, not {document[name]!r}")
        return cls(
            name=str(document["pipeline"]),
            stages=tuple(_stage(number, each) for number, each in enumerate(document["stages"])),
            messages=tuple(map(_message, document["messages"])),
            ranks=tuple(tuple(map(_group, order)) for order in document["ranks"]),
        )


def _check_number(what: str, value: object) -> None:
    if not isinstance(value, int | float) or not 0 <= value < inf:
        raise ValueError(f"{what} of at least 0, not {value!r}")


def _lines(items: Sequence[Any]) -> str:
    """Returns a JSON list with one line for each item."""
    return "[\n" + ",\n".join(f"    {json.dumps(item)}" for item in items) + "\n  ]"


def _check_passes(ranks: Sequence[Sequence[TaskGroup]], stages: int) -> None:
    """Raises ValueError unless each microbatch passes each stage once, forward and backward."""
    tasks = list(_tasks(ranks))
    if not stages or not tasks:
        raise ValueError("a pipeline schedule needs at least one stage and one pass")
    for task in tasks:
        if task.stage >= stages:
            raise ValueError(f"{task.text}: the schedule has {stages} stages, from 0 on")
    rank_of: dict[int, int] = {}
    for rank, order in enumerate(ranks):
        if not order:
            raise ValueError(f"rank {rank} has no passes")
        for task in _tasks([order]):
            if rank_of.setdefault(task.stage, rank) != rank:
                raise ValueError(
                    f"stage {task.stage} runs on rank {rank_of[task.stage]} and on rank {rank}; "
                    "expected one rank"
                )
    known = set(tasks)
    if len(known) < len(tasks):
        raise ValueError(f"{next(t for t in tasks if tasks.count(t) > 1).text} occurs twice")
    for microbatch in range(1 + max(task.microbatch for task in tasks)):
        for stage in range(stages):
            kinds = "".join(k for k in "FBIW" if StageTask(k, microbatch, stage) in known)
            if kinds not in ("FB", "FIW"):
                raise ValueError(
                    f"stage {stage} must run F and B, or F, I and W, of microbatch {microbatch}; "
                    f"found {', '.join(kinds) or 'none'}"
                )


def _tasks(ranks: Iterable[Iterable[TaskGroup]]) -> Iterator[StageTask]:
    """Yields all passes."""
    return (task for order in ranks for group in order for task in group)


def _check_fields(what: str, document: Any, names: Iterable[str]) -> None:
    if not isinstance(document, Mapping) or set(document) != set(names):
        found = f"{', '.join(document)}" if isinstance(document, Mapping) else repr(document)
        raise ValueError(f"{what} is a JSON object with {', '.join(names)}, not {found}")


def _stage(number: int, document: Any) -> StageTimes:
    _check_fields(f"stage {number}", document, StageTimes.__slots__)
    return StageTimes(**document)


def _message(document: Any) -> StageMessage:
    _check_fields("a message", document, _MESSAGE)
    for name in ("from_stage", "to_stage"):
        if not isinstance(document[name], int):
            raise ValueError(f"{name} must be the number of a stage, not {document[name]!r}")
    rest = dict(document)
    return StageMessage(nbytes=rest.pop("bytes"), **rest)


def _group(document: Any) -> TaskGroup:
    return tuple(map(_task, document if isinstance(document, list) else [document]))


def _task(text: Any) -> StageTask:
    found = _TASK.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(
            f"{text!r}: expected a pass as STAGE, F, B, I or W, MICROBATCH, such as 1F0"
        )
    stage, kind, microbatch = found.groups()
    return StageTask(kind, int(microbatch), int(stage))


def _group_text(group: TaskGroup) -> str | list[str]:
    texts = [task.text for task in group]
    return texts if len(texts) > 1 else texts[0]
