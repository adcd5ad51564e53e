"""The result of a search: the candidates, best first, and how many combinations it considered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.workload import Workload
from unisono.planner.prediction import Prediction


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of the best layouts that a search found, with its predicted time and memory."""

    layout: Layout
    job: Workload
    prediction: Prediction
    next_lost: str
    """Reason why the next candidate is worse than this one, with the kinds of time that differ
    most. Empty for the last candidate."""


@dataclass(frozen=True, kw_only=True)
class SearchCounts:
    """Numbers of combinations that a search considered, and what became of them."""

    considered: int
    """Combinations of layout, micro batch and recomputation that can train the model."""
    too_large: int
    """Combinations that the search reached but that do not fit in memory."""
    bounded: int
    """Combinations that were skipped, because their memory, or a lower bound of their time, shows
    that they cannot be candidates."""
    predicted: int
    """Combinations whose step time was computed."""


@dataclass(frozen=True, kw_only=True)
class Candidates(Sequence[Candidate]):
    """The candidates of a search, best first, and its counts of combinations."""

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
