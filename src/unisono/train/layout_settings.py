"""Settings of a training run of one layout, which the parent process writes and ranks read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from unisono.planner import Layout, Transformer

LayoutTask = Literal["digits", "text", "moe", "long", "dlrm"]
"""Tasks that can be divided by a layout."""

_TEXT = Transformer(layers=4, hidden=64, heads=4, vocab=256, positions=128)
SHAPES: dict[LayoutTask, Transformer] = {
    "text": _TEXT,
    "moe": replace(_TEXT, experts=8, top_k=2, expert_ffn=128, tied=False),
    "long": replace(_TEXT, layers=2, positions=1024, kv_heads=2),
}
"""Transformer of each task that trains a transformer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRun:
    """The settings of one job, which trains a task with one layout."""

    task: LayoutTask
    ranks: int
    layout: Layout
    steps: int
    batch: int
    """Number of samples of a step, over all ranks."""
    microbatches: int
    learning_rate: float
    clip: float | None
    seed: int
    dtype: Literal["float32", "float64"] = "float32"
    context: str = "ring"
    """Kind of the exchange of keys and values on `cp`: ring, ulysses or allgather."""
    dropout: float = 0.0
    """Probability of dropout in a transformer."""
    capacity_factor: float | None = None
    """Capacity of an expert divided by its mean load; None: no token is dropped."""
    placement: str = "auto"
    """Kind of the placement of embedding tables on the ranks of `dp`: "auto", or one of
    `planner.recommendation.TABLE_KINDS`."""
    tells_passes: bool = False
    """True if the result contains the passes of the last step, measured and predicted."""
    tells_schedule: bool = False
    """True if the result contains the pipeline schedule with the times of the last step."""
    predicts: bool = False
    """True if the result also contains the time of a step, forecast before the training."""
    save: str | None = None
    """Folder for a checkpoint at the end of the run."""
    load: str | None = None
    """Folder of the checkpoint with which the run begins."""
    timeout_s: float = 120.0
    """Seconds that a rank waits for another rank."""
    shape: Transformer | None = field(default=None)
    """Transformer of the task; None: the transformer of `SHAPES`."""

    def __post_init__(self) -> None:
        layout = self.layout
        if layout.devices != self.ranks:
            rest = layout.tp * layout.pp * layout.cp
            near = max(self.ranks // rest, 1)
            used = near * rest
            works = f"uses {used}" if used == self.ranks else f"works with {used} ranks"
            raise ValueError(
                f"dp x tp x pp x cp = {layout.dp} x {layout.tp} x {layout.pp} x {layout.cp} = "
                f"{layout.devices}, but there are {self.ranks} ranks; dp = {near} {works}"
            )

    def encode(self) -> str:
        """Returns the settings as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> LayoutRun:
        """Returns the settings that `encode` returned as `text`."""
        fields: dict[str, Any] = json.loads(text)
        layout = Layout.from_document(fields.pop("layout"))
        shape = fields.pop("shape")
        return LayoutRun(layout=layout, shape=Transformer(**shape) if shape else None, **fields)
