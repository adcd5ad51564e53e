"""A case: a small model, its batches, a layout and options, as plain data."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Everything that determines one comparison. The defaults are the plainest choices."""

    seed: int = 0
    """Seed of the weights and of the batches."""
    layout: str = ""
    """The layout, as `Layout.parse` reads it."""
    resumed: str | None = None
    """The layout in which training goes on from a checkpoint after the first steps; None: no
    checkpoint."""
    inputs: str = "features"
    """Kind of inputs: a key of `models.STEMS`."""
    width: int = 6
    """Number of features between the blocks."""
    container: str = "sequential"
    """How blocks are put together: a key of `models.CONTAINERS`."""
    blocks: tuple[str, ...] = ()
    """The blocks of the model, as keys of `blocks.BLOCKS`."""
    head: str = "positions"
    """The last module: a key of `models.HEADS`."""
    loss: str = "cross_entropy"
    """A key of `losses.LOSSES`."""
    ignored: str = "none"
    """Which targets are ignored: a key of `batches.IGNORED_PARTS`."""
    batches: tuple[tuple[int, int], ...] = ((8, 4), (8, 4))
    """Number of samples and of positions of each step's batch."""
    microbatches: int = 1
    clip: float | None = None
    optimizer: str = "sgd"
    """A key of `optimizers.OPTIMIZERS`."""
    habit: str = "none"
    """What the program does beside `step`: a key of `habits.HABITS`."""
    autocast: bool = False
    """Whether steps run under autocast to bfloat16."""
    example: bool = False
    """Whether `parallelize` receives an example of the inputs."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the layout."""
        count = 1
        for part in filter(None, self.layout.split(",")):
            name, _, value = part.partition("=")
            count *= int(value) if name in ("dp", "tp", "pp", "cp") else 1
        return count

    def to_json(self) -> str:
        """Returns the fields that differ from the defaults, as JSON."""
        plain = {each.name: each.default for each in fields(self)}
        assert MISSING not in plain.values()
        return json.dumps({k: v for k, v in asdict(self).items() if v != plain[k]})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote."""
        found = json.loads(text)
        found["blocks"] = tuple(found.get("blocks", ()))
        if "batches" in found:
            found["batches"] = tuple(map(tuple, found["batches"]))
        return cls(**found)
