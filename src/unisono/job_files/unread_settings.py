"""Settings of job files that the planner does not read, and what they mean for a prediction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

KINDS = ("assumed", "without effect", "unknown")
"""Settings that the planner expects to have their usual value, those that change neither times nor
memory, and those that `job_settings.json` does not have."""
_PATH = Path(__file__).with_name("job_settings.json")


@cache
def _known() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(_PATH.read_text(encoding="utf-8"))
    return found


def known_kind(framework: str, name: str, table: str | None = None) -> str:
    """Returns the kind of a setting. `table`: the table of a TOML file.

    >>> known_kind("megatron", "lr"), known_kind("megatron", "overlap_grad_reduce")
    ('without effect', 'assumed')
    >>> known_kind("torchtitan", "lr", "optimizer"), known_kind("torchtitan", "x", "y")
    ('without effect', 'unknown')
    """
    for kind, known in _known()[framework].items():
        if table is not None:
            if set(known.get(table, ())) & {name, "*"}:
                return str(kind)
        elif any(name == each or (len(each) > 2 and name.startswith(each)) for each in known):
            return str(kind)
    return "unknown"


def sorted_settings(settings: Iterable[tuple[str, str]]) -> Mapping[str, tuple[str, ...]]:
    """Returns the settings of each kind."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for text, kind in settings:
        found[kind].append(text)
    return {kind: tuple(each) for kind, each in found.items()}
