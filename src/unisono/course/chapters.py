"""The chapters of the course, in order, and the files of their labs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

LANGUAGES: Final = ("en", "zh")


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """A chapter: its number from 1, the name of its file, and its title in each language."""

    number: int
    name: str
    titles: dict[str, str]


_TITLES: Final = {
    "parallelism": ("Why a model needs communication", "模型为什么需要通信"),
    "primitives": ("Primitives, and their parts", "集合通信原语及其组成"),
    "algorithms": ("Algorithms: write, prove, break, run", "算法：编写、证明、破坏、运行"),
    "topologies": ("Topologies, and the link that limits", "拓扑，以及成为瓶颈的链路"),
    "overlap": ("Overlap of computation and communication", "计算与通信的重叠"),
    "strategies": ("Parallel strategies and their mixtures", "并行策略及其组合"),
    "walls": ("The four walls, and trust in a prediction", "四堵墙，以及预测的可信度"),
}


def chapters() -> list[Chapter]:
    """Returns all chapters, in the order of the course."""
    return [
        Chapter(number=number, name=name, titles=dict(zip(LANGUAGES, titles, strict=True)))
        for number, (name, titles) in enumerate(_TITLES.items(), 1)
    ]


def lab(chapter: str, language: str = "en") -> Path:
    """Returns the file of a chapter's lab. `chapter` is a number from 1 or a name.

    Raises `ValueError` for another chapter or language.
    """
    if language not in LANGUAGES:
        raise ValueError(f"language: expected one of {', '.join(LANGUAGES)}, got {language!r}")
    for each in chapters():
        if chapter in (str(each.number), each.name):
            return Path(__file__).parent / language / f"chapter{each.number}_{each.name}.py"
    known = ", ".join(f"{each.number} ({each.name})" for each in chapters())
    raise ValueError(f"chapter: expected one of {known}, got {chapter!r}")
