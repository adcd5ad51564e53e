"""Settings of a training run of one layout: plain data that the parent makes and ranks read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from unisono.planner import Layout, Transformer

LayoutTask = Literal["digits", "text", "moe", "long", "dlrm"]
"""Tasks that a layout can divide."""

_TEXT = Transformer(layers=4, hidden=64, heads=4, vocab=256, positions=128)
SHAPES: dict[LayoutTask, Transformer] = {
    "text": _TEXT,
    "moe": replace(_TEXT, experts=8, top_k=2, expert_ffn=128, tied=False),
    "long": replace(_TEXT, layers=2, positions=1024, kv_heads=2),
}
"""The transformers of the tasks that have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRun:
    """One job: a task, trained with one layout."""

    task: LayoutTask
    ranks: int
    layout: Layout
    steps: int
    batch: int
    """Samples of a step, of all ranks together."""
    microbatches: int
    learning_rate: float
    clip: float | None
    seed: int
    dtype: Literal["float32", "float64"] = "float32"
    context: str = "ring"
    """Exchange of keys and values between the ranks of `cp`: ring, ulysses or allgather."""
    dropout: float = 0.0
    """Probability that a transformer drops a value."""
    capacity_factor: float | None = None
    """Capacity of an expert over its mean load; None: no token is dropped."""
    placement: str = "auto"
    """Division of embedding tables over the ranks of `dp`: a kind, or "auto"."""
    tells_passes: bool = False
    """The result also has the passes of the last step, measured and predicted."""
    save: str | None = None
    """Folder of a checkpoint to write at the end."""
    load: str | None = None
    """Folder of a checkpoint to begin with."""
    timeout_s: float = 120.0
    """Seconds that a rank waits for another rank."""
    shape: Transformer | None = field(default=None)
    """The transformer of the task. None: the one of `SHAPES`."""

    def __post_init__(self) -> None:
        layout = self.layout
        if layout.devices != self.ranks:
            rest = layout.tp * layout.pp * layout.cp
            near = max(self.ranks // rest, 1)
            raise ValueError(
                f"dp x tp x pp x cp = {layout.dp} x {layout.tp} x {layout.pp} x {layout.cp} = "
                f"{layout.devices}, but there are {self.ranks} ranks; dp = {near} uses "
                f"{near * rest}"
            )

    def encode(self) -> str:
        """Returns the run as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> LayoutRun:
        """Returns the run that `encode` wrote as `text`."""
        fields: dict[str, Any] = json.loads(text)
        layout = Layout.from_document(fields.pop("layout"))
        shape = fields.pop("shape")
        return LayoutRun(layout=layout, shape=Transformer(**shape) if shape else None, **fields)
