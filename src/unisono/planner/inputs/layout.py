"""A layout: how a model and its batch are divided among the devices of a training run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from unisono.division import nearest_divisor
from unisono.pipeline import SCHEDULES, PipelineSize, ScheduleRules
from unisono.planner.inputs.tensor_grid import TensorGrid
from unisono.planner.inputs.whole_numbers import switch, whole_number
from unisono.text_files import reading

_TEXTS = ("schedule", "tensor")
_COUNTS = ("dp", "tp", "pp", "cp", "ep", "vpp", "dp_replicate")
_OTHER_NAMES = {"sp": "sequence_parallel", "replicas": "dp_replicate", "zero_stage": "zero"}
"""Names that others use for fields, and those that `Layout.text` prints."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes and the options of each.

    The run has `dp x tp x pp x cp` devices. The experts are divided among the `dp x cp x tp`
    devices of a stage: `ep` of these hold different experts. Raises ValueError for sizes that
    cannot exist.

    >>> Layout(dp=16, tp=8, pp=8).devices
    1024
    >>> Layout(tp=0)
    Traceback (most recent call last):
    ValueError: tp must be at least 1, not 0
    """

    dp: int = 1
    """Data parallelism: number of replicas (or shards) of the model, each of which sees different
    samples."""
    tp: int = 1
    """Tensor parallelism: number of devices among which each matrix is divided."""
    pp: int = 1
    """Pipeline parallelism: number of stages, each with some of the layers."""
    cp: int = 1
    """Context parallelism: number of devices among which each sequence is divided."""
    ep: int = 1
    """Expert parallelism: number of devices that hold different experts."""
    vpp: int | None = 1
    """Interleaved schedule: number of groups of layers (virtual stages) on each stage. None: the
    planner chooses."""
    sequence_parallel: bool = False
    """True if the operators between the matrix products work on a sequence that is divided among
    the `tp` devices."""
    zero: int = 0
    """ZeRO stage: 1 divides the optimizer states among `dp x cp` devices, 2 the gradients too, 3
    also the weights."""
    dp_replicate: int = 1
    """Number of replicas of the shards (hybrid sharding): ZeRO divides among `dp x cp /
    dp_replicate` devices."""
    schedule: str = "1f1b"
    """Pipeline schedule: one of `unisono.pipeline.SCHEDULES`."""
    tensor: str = "1d"
    """Kind of tensor parallelism: one of `TENSOR_KINDS`."""

    def __new__(cls, **given: object) -> Self:
        """Raises TypeError for unknown fields, with the right name."""
        if not given.keys() <= cls.__dataclass_fields__.keys():
            raise TypeError(unknown_field_text(min(given.keys() - set(cls.__dataclass_fields__))))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if (type(value) is int and value > 0) or (name == "vpp" and value is None):
                continue
            object.__setattr__(self, name, whole_number(name, value))
        divided: object = self.sequence_parallel
        if type(divided) is not bool:
            object.__setattr__(self, "sequence_parallel", switch("sequence_parallel", divided))
        if type(self.zero) is not int:
            object.__setattr__(self, "zero", whole_number("zero", self.zero, least=0))
        if not 0 <= self.zero <= 3:
            raise ValueError(f"zero must be 0, 1, 2 or 3, not {self.zero}")
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}"
            )
        TensorGrid.of(self.tensor, self.tp)
        if self.sequence_parallel and self.tensor != "1d":
            raise ValueError(
                f"tensor = {self.tensor} divides the samples between the matrices; "
                "sequence_parallel = 0 works"
            )
        group = self.dp * self.cp * self.tp
        if group % self.ep:
            near = nearest_divisor(group, self.ep)
            raise ValueError(
                f"ep must divide dp x cp x tp: {self.ep} does not divide {self.dp} x {self.cp} x "
                f"{self.tp} = {group}; {near} does"
            )
        if self.dp % self.dp_replicate:
            near = nearest_divisor(self.dp, self.dp_replicate)
            raise ValueError(
                f"dp_replicate must divide dp: {self.dp_replicate} does not divide {self.dp}; "
                f"{near} does"
            )

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def microbatch_zero(self) -> int:
        """ZeRO stage while the microbatches of a step run.

        A pipeline gathers the weights of its stages once in a step, and sums their gradients once,
        so it holds both whole, as with ZeRO-1 (`unisono.parallel`, torchtitan, Llama 3).
        """
        return self.zero if self.pp == 1 else min(self.zero, 1)

    @property
    def chunks(self) -> int:
        """Number of groups of layers of a stage: `vpp`, or 1 if `vpp` is None."""
        return self.vpp or 1

    @property
    def rules(self) -> ScheduleRules:
        """The rules of the pipeline schedule."""
        return SCHEDULES[self.schedule]

    def pipeline_size(self, microbatches: int) -> PipelineSize:
        """Returns the size of a pipeline with this number of microbatches."""
        return PipelineSize(self.pp, self.chunks, microbatches)

    @property
    def tensor_grid(self) -> TensorGrid:
        """The grid of the `tp` ranks: number of ranks along its depth, rows and columns."""
        return TensorGrid.of(self.tensor, self.tp)

    def save(self, path: str | Path) -> None:
        """Writes the layout to a JSON file."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Layout:
        """Reads a layout from a JSON file that `save` wrote. Raises ValueError for other files."""
        with reading(Path(path)) as text:
            return cls.from_document(json.loads(text))

    @classmethod
    def read(cls, text: str) -> Layout:
        """Returns the layout of a command-line text: a .json file's name or a text for `parse`."""
        return cls.load(text) if text.endswith(".json") else cls.parse(text)

    @classmethod
    def from_document(cls, document: Any) -> Layout:
        """Returns the layout of a JSON object. Raises ValueError for unknown fields."""
        if not isinstance(document, dict):
            raise ValueError(f"a layout is a JSON object, not {type(document).__name__}")
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(document) - set(known))
        if unknown and unknown[0] in _OTHER_NAMES:
            raise ValueError(unknown_field_text(unknown[0]))
        if unknown:
            raise ValueError(f"unknown fields {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(**document)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Returns the layout of a short text such as "dp=16,tp=8,pp=8,sequence_parallel=1,zero=1".

        Raises ValueError for other texts.

        >>> Layout.parse("dp=2,tp=4").devices
        8
        """
        known = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, value = part.partition("=")
            if name in _OTHER_NAMES:
                raise ValueError(unknown_field_text(name))
            if name not in known or not (name in _TEXTS or value.isdecimal()):
                raise ValueError(
                    f"a layout is NAME=NUMBER,... with names of {', '.join(known)}, not {part!r}"
                )
            if name in values:
                raise ValueError(f"the layout states {name} twice: {text!r}")
            values[name] = value if name in _TEXTS else int(value)
        return cls(**values)

    def text(self) -> str:
        """Returns the axes that are used, in one line, such as "dp16 tp8 pp8 sp zero1"."""
        names = ("dp", "tp", "pp", "vpp", "cp", "ep")
        parts = [f"{name}{getattr(self, name)}" for name in names if (getattr(self, name) or 1) > 1]
        if self.tensor != "1d":
            parts.append(self.tensor)
        if self.sequence_parallel:
            parts.append("sp")
        if self.zero:
            parts.append(f"zero{self.zero}")
        if self.dp_replicate > 1:
            parts.append(f"replicas{self.dp_replicate}")
        if self.pp > 1 and self.schedule != "1f1b":
            parts.append(self.schedule)
        return " ".join(parts) or "one device"


def unknown_field_text(name: str) -> str:
    """Returns what is wrong with a field that a layout does not have, and the nearest name.

    >>> unknown_field_text("sp")
    'a layout has no sp; sequence_parallel is its name'
    """
    known = [field.name for field in fields(Layout)]
    right = _OTHER_NAMES.get(name)
    if right is None:
        import difflib

        near = difflib.get_close_matches(name, known, n=1)
        return f"a layout has no {name}; " + (
            f"{near[0]} is near" if near else f"it has {', '.join(known)}"
        )
    return f"a layout has no {name}; {right} is its name"
