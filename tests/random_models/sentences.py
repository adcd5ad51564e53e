"""Whether an error tells a user what is wrong and what to write instead."""

from __future__ import annotations

import re

from random_models.outcome import Outcome

_CURE = re.compile(
    r"\bworks?\b|\bexpected\b|\bneeds?\b|\bcall\b|\bpass\b|\buse\b|\bmust\b|\binstead\b|"
    r"\bset\b|\bgive\b|\bmake\b|; .* (is|does)\b"
)
_INTERNAL = re.compile(
    r"DTensor|aten[:.]|ProxyTensor|FakeTensor|Traceback|\.cpp|c10|<[a-z_.]+ object at|"
    r"size mismatch|must match the size|PipelineStage|GuardOnDataDependent|0x[0-9a-f]{6}"
)
_REFUSALS = {"ValueError", "TypeError", "UnisonoError"}
_LONGEST = 600


def fault_of_error(outcome: Outcome) -> str | None:
    """Returns what is wrong with an error, or None for a refusal in one clear line."""
    text = outcome.error or ""
    if not _REFUSALS & set(outcome.kinds) or "/unisono/" not in outcome.raised_in:
        return "raw error"
    if "\n" in text or len(text) > _LONGEST:
        return "error of several lines"
    if _INTERNAL.search(text):
        return "error with internals of torch"
    return None if _CURE.search(text) else "error without a cure"
