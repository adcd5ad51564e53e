"""The result of a search: the candidates, best first, and how many combinations it considered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.workload import Workload
from unisono.planner.prediction import Prediction

TIE = 0.1
"""Least chance to be better than the first candidate with which a candidate ties: then the 80 %
interval of the ratio of their times contains 1."""


class Alternative(NamedTuple):
    """The fastest variant of a candidate that fits in memory and has another value of a setting."""

    setting: str
    text: str
    """The setting and its value, such as "micro 2"."""
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of the best layouts that a search found, with its predicted time and memory."""

    layout: Layout
    job: Workload
    prediction: Prediction
    next_lost: str
    """Reason why the next candidate is worse than this one, with the kinds of time that differ
    most. Empty for the last candidate."""
    chance: float
    """Probability that this candidate is better than the first one: faster, or with the objective
    "cost" cheaper. Layouts of one model on one cluster share most of their errors."""
    alternatives: tuple[Alternative, ...]
    """For each setting, the fastest variant with another value, fastest first."""


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
    objective: str
    """The quantity that the search minimised."""

    @property
    def ties(self) -> tuple[Candidate, ...]:
        """The first candidate, and those inside the 80 % interval of their difference to it. Empty
        for the objectives "devices" and "memory", whose order has no chance in it."""
        if self.objective not in ("time", "cost"):
            return ()
        return tuple(each for each in self.entries if each.chance >= TIE)

    def tie_text(self) -> str:
        """Returns a line about the candidates that tie with the first one; empty without any."""
        ties = self.ties
        tied = [row for row, each in enumerate(self.entries, 1) if each in ties]
        if len(tied) < 2:
            return ""
        is_range = tied[-1] == len(tied) > 2
        rows = f"1 to {len(tied)}" if is_range else ", ".join(map(str, tied))
        return (
            f"rows {rows} tie: each is better than row 1 with a probability of {TIE:.0%} or more, "
            "so only a measurement can order them"
        )

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...

    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self.entries[index]
