"""The list of refusals in docs/parallel.md against the errors in the code of `unisono.parallel`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = ROOT / "src/unisono/parallel"
OTHER_PAGES = ("recommendation", "parameter_server", "data_parallelism", "compression")
SHORT = 75
"""A shorter text is a part of an error."""


def texts(without: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields all strings of the code, with … for each value that is filled in."""
    for path in CODE.rglob("*.py"):
        if path.relative_to(CODE).parts[0] in without:
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        filled = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
        inside = {id(value) for values in filled for value in values}
        for values in filled:
            yield "".join(v.value if isinstance(v, ast.Constant) else "…" for v in values)
        for node in nodes:
            if isinstance(node, ast.Constant) and id(node) not in inside:
                yield str(node.value)


def listed() -> list[str]:
    """Returns the words of errors in the list."""
    section = (ROOT / "docs/parallel.md").read_text().partition("\n## What is refused\n")[2]
    rows = re.findall(r"^\|.*\|([^|]*)\|$", section.partition("\n## ")[0], re.MULTILINE)
    return [words for last in rows for words in re.findall("`([^`]+)`", last)]


def test_each_listed_error_is_in_the_code() -> None:
    found = list(texts())
    missing = [words for words in listed() if not any(words in text for text in found)]
    assert len(listed()) > 60 and missing == []


def test_each_error_that_proposes_another_layout_is_listed() -> None:
    proposals = [
        text for text in texts(OTHER_PAGES) if len(text) > SHORT and re.search(r" works?$", text)
    ]
    missing = [each for each in proposals if not any(words in each for words in listed())]
    assert len(proposals) > 40 and missing == []
