"""What a process reports of its training."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch

Blocks = dict[str, tuple[tuple[int, ...], torch.Tensor]]


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Losses and norms of the steps, the last weights, and the error that ended the training."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: Blocks = field(default_factory=dict)
    """For each parameter and buffer of this process, its block's start and values."""
    phase: str = "parallelize"
    """What the process did last."""
    error: str | None = None
    """The text of the error."""
    kinds: tuple[str, ...] = ()
    """The names of the classes of the error."""
    raised_in: str = ""
    """The file whose code raised the error."""
    trace: str = ""

    def fail(self, error: BaseException) -> None:
        """Records an error."""
        frames = traceback.extract_tb(error.__traceback__)
        self.error = str(error)
        self.kinds = tuple(each.__name__ for each in type(error).__mro__)
        self.raised_in = frames[-1].filename if frames else ""
        self.trace = "".join(traceback.format_exception(error))

    def write(self, path: Path) -> None:
        """Writes the outcome so that a reader never sees a part of it."""
        new = path.with_suffix(".new")
        new.write_bytes(pickle.dumps(self))
        new.rename(path)

    @staticmethod
    def read(path: Path) -> Outcome:
        """Reads what `write` wrote."""
        found = pickle.loads(path.read_bytes())
        assert isinstance(found, Outcome)
        return found
