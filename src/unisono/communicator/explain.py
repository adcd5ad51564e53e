"""Why a call is served as it is."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.communicator.calls import Choice
from unisono.types import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The choice for one kind of call. Printing it gives a sentence."""

    op: Op
    nbytes: int
    ranks: int
    algorithm: str
    reason: str
    block_bytes: int

    @classmethod
    def of(cls, op: Op, nbytes: int, ranks: int, choice: Choice) -> Explanation:
        """The explanation of a choice."""
        return cls(
            op=op,
            nbytes=nbytes,
            ranks=ranks,
            algorithm=choice.plan.name,
            reason=choice.verdict.rule.reason if choice.verdict else "the only way",
            block_bytes=choice.plan.block_bytes,
        )

    def __str__(self) -> str:
        return (
            f"{self.op} of {self.nbytes} bytes on {self.ranks} ranks: {self.algorithm} "
            f"({self.reason}), in blocks of {self.block_bytes} bytes"
        )
