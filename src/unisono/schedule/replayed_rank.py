"""State of one rank in the replay of execution plans (`replay.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from unisono.schedule.execution_plan import ExecutionPlan

Content = tuple[int, int]
"""Content of memory or of a slot, as (chunk, bit mask of contributing ranks)."""
Row = tuple[int, ...]
"""Fields of a record: code, nsrc, peer, flags, value, round, posted, dst, dst2, src, length."""


@dataclass(slots=True, kw_only=True)
class Slot:
    """A slot and the block that it serves."""

    content: Content
    block: int
    written: int
    index: int
    holds_address: bool = False
    """True if the slot holds the address of the content instead of the content."""
    writable: bool = False
    """True if the reader of the content may overwrite it."""
    reads: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ReplayedRank:
    """Progress and memory of a rank in the replay."""

    plan: ExecutionPlan
    rows: list[Row]
    clock: list[int]
    step: int = 0
    pc: int = 0
    block: int = 0
    """Block of the current record."""
    entered: bool = False
    inputs: dict[int, Content] = field(default_factory=dict)
    results: dict[int, Content] = field(default_factory=dict)
    aliased_inputs: dict[int, int] = field(default_factory=dict)
    """The input that has the same address as each output, in an in-place call."""
    memory: dict[int, dict[int, Content]] = field(default_factory=dict)
    """Content of the memory to which each reference points, in each block."""
    shared_slots: dict[int, dict[int, Slot]] = field(default_factory=dict)
    """Slots that hold the address of memory, by block and by the reference to this memory."""
    local_reads: dict[int, dict[int, int]] = field(default_factory=dict)
    """This rank's clock at its last read of its own memory, by block and reference."""
    foreign_writes: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    """Writes of other ranks to this rank's memory, by block and reference: writer and its clock."""
    posted: list[int] = field(default_factory=list)
    post_clocks: list[tuple[int, ...]] = field(default_factory=list)
