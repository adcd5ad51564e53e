"""Which algorithm serves a call: a table of rules, first match wins."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.types import Op

_DIRECT_SCAN_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Up to `most_bytes` (of the caller's largest buffer; None: any size) use `algorithm`."""

    op: Op
    algorithm: str
    most_bytes: int | None = None
    reason: str

    def serves(self, op: Op, nbytes: int) -> bool:
        """Whether the rule applies."""
        return op is self.op and (self.most_bytes is None or nbytes <= self.most_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rules in order; the last rule of each operation has no limit."""

    rules: tuple[Rule, ...]

    def choose(self, op: Op, nbytes: int) -> Rule:
        """The first rule that serves the call."""
        return next(rule for rule in self.rules if rule.serves(op, nbytes))


def default_selection(ranks: int) -> Selection:
    """What measurement on one host says: exchange everything with everybody, in one step while
    the switches between ranks cost more than the bytes, else reduce in shares.

    >>> default_selection(4).choose(Op.ALL_REDUCE, 1024).algorithm
    'one_shot'
    """
    one_shot_bytes = 4 << 10 if ranks <= 2 else 16 << 10
    few = "each rank reads all: one exchange, fewest switches between ranks"
    many = "each rank reduces its share: least bytes per rank"
    prefixes = "each rank reads all below it: one exchange"
    pipeline = "the prefix runs up the ranks in parts: least bytes per rank"
    straight = "one exchange: every byte is written once and read where it is needed"
    return Selection(
        rules=(
            Rule(op=Op.ALL_REDUCE, algorithm="one_shot", most_bytes=one_shot_bytes, reason=few),
            Rule(op=Op.ALL_REDUCE, algorithm="direct", reason=many),
            Rule(op=Op.REDUCE, algorithm="direct", most_bytes=one_shot_bytes, reason=few),
            Rule(op=Op.REDUCE, algorithm="reduce_scatter_gather", reason=many),
            *(
                rule
                for op in (Op.SCAN, Op.EXSCAN)
                for rule in (
                    Rule(op=op, algorithm="direct", most_bytes=_DIRECT_SCAN_BYTES, reason=prefixes),
                    Rule(op=op, algorithm="chain", reason=pipeline),
                )
            ),
            *(
                Rule(op=op, algorithm="direct", reason=straight)
                for op in Op
                if op not in (Op.ALL_REDUCE, Op.REDUCE, Op.SCAN, Op.EXSCAN)
            ),
        )
    )
