"""The result of a search: candidates, fastest first, and counts of the other layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.workload import Workload
from unisono.planner.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout of a search."""

    layout: Layout
    job: Workload
    prediction: Prediction
    next_lost: str
    """Reason why the next candidate is worse, with the kinds of time that differ most."""


@dataclass(frozen=True, kw_only=True)
class SearchCounts:
    """Numbers of combinations in a search, by result."""

    considered: int
    """Combinations of layout, micro batch and recomputation that can train the model."""
    too_large: int
    """Combinations that the search reached but that do not fit in memory."""
    bounded: int
    """Combinations whose lower bound is over the time of the last candidate kept."""
    predicted: int
    """Combinations whose step time was computed."""


@dataclass(frozen=True, kw_only=True)
class Candidates(Sequence[Candidate]):
    """The candidates of a search, fastest first, and its counts."""

    entries: tuple[Candidate, ...]
    counts: SearchCounts

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self.entries[index]
