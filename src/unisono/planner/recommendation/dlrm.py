"""The sizes of a recommendation model (DLRM): its parameters, known models, and models of files."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from unisono.planner.data_files import data_text
from unisono.text_files import reading

INTERACTIONS = ("dot", "cross")
"""Kinds of interaction. dot: dot products of all pairs of vectors (Naumov et al., 2019). cross: a
deep cross network with matrices of low rank (Wang et al., "DCN V2", 2021)."""
_MOST_IDS = 255  # a bag's length is sent as one byte
_SIZES = ("counters", "width", "bottom", "top", "interaction", "cross_layers", "cross_rank")


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShape:
    """The embedding table of one feature. Raises `ValueError` for impossible sizes."""

    rows: int
    """Number of different ids."""
    ids: int = 1
    """Largest number of ids of a sample; a bag may hold fewer or no ids."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows: expected at least 1, got {self.rows}")
        if not 1 <= self.ids <= _MOST_IDS:
            raise ValueError(f"ids: expected 1 to {_MOST_IDS}, got {self.ids}")


@dataclass(frozen=True, kw_only=True)
class Dlrm:
    """The sizes of a deep learning recommendation model. Raises `ValueError` for impossible sizes.

    >>> tables = (TableShape(rows=1000, ids=3), TableShape(rows=10))
    >>> shape = Dlrm(counters=2, width=4, tables=tables, bottom=(8,), top=(8,))
    >>> shape.columns, shape.parameters
    (6, 4173)
    """

    counters: int
    """Number of dense features, which are integer counts."""
    width: int
    """Number of elements of an embedding vector, equal for all tables."""
    tables: tuple[TableShape, ...]
    """The table of each categorical feature."""
    bottom: tuple[int, ...]
    """Widths of the hidden layers between the dense features and the interaction."""
    top: tuple[int, ...]
    """Widths of the hidden layers between the interaction and the logit."""
    interaction: str = "dot"
    """One of `INTERACTIONS`."""
    cross_layers: int = 0
    """Number of layers of the interaction "cross"."""
    cross_rank: int = 0
    """Rank of the matrices of the interaction "cross"."""

    def __post_init__(self) -> None:
        for name, size in [("counters", self.counters), ("width", self.width)]:
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        for name in ("bottom", "top"):
            widths = getattr(self, name)
            if any(size < 1 for size in widths):
                raise ValueError(f"{name}: expected widths of at least 1, got {widths}")
        if not self.tables:
            raise ValueError("tables: expected at least one, got none")
        if self.interaction not in INTERACTIONS:
            raise ValueError(
                f"interaction: expected {' or '.join(INTERACTIONS)}, got {self.interaction!r}"
            )
        for name in ("cross_layers", "cross_rank"):
            size = getattr(self, name)
            if (size > 0) != (self.interaction == "cross") or size < 0:
                expected = "at least 1" if self.interaction == "cross" else "0"
                raise ValueError(
                    f"{name}: expected {expected} for the interaction {self.interaction}, got "
                    f"{size}"
                )

    @property
    def columns(self) -> int:
        """Number of columns of the input: counters, then places for the ids of each table."""
        return self.counters + self.ids

    @cached_property
    def ids(self) -> int:
        """Largest number of ids of a sample in all tables together."""
        return sum(table.ids for table in self.tables)

    @property
    def vectors(self) -> int:
        """Number of vectors of a sample that interact: one of each table and the dense vector."""
        return len(self.tables) + 1

    @property
    def interactions(self) -> int:
        """Number of pairs among the embedding vectors and the dense vector."""
        return self.vectors * (self.vectors - 1) // 2

    @property
    def bottom_widths(self) -> tuple[int, ...]:
        """Widths of the bottom layers, from the input to the output."""
        return (self.counters, *self.bottom, self.width)

    @property
    def top_widths(self) -> tuple[int, ...]:
        """Widths of the top layers, from the input to the output."""
        crossed = self.interaction == "cross"
        inputs = self.vectors * self.width if crossed else self.width + self.interactions
        return (inputs, *self.top, 1)

    @property
    def table_parameters(self) -> int:
        """Number of parameters of the embedding tables."""
        return sum(table.rows for table in self.tables) * self.width

    @property
    def dense_parameters(self) -> int:
        """Number of parameters outside the embedding tables."""
        inputs = self.vectors * self.width
        found = self.cross_layers * (2 * inputs * self.cross_rank + inputs)
        for widths in (self.bottom_widths, self.top_widths):
            found += sum((a + 1) * b for a, b in pairwise(widths))
        return found

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return self.table_parameters + self.dense_parameters


@cache
def _known() -> Mapping[str, Dlrm]:
    """Returns the known models. `data/dlrm_models.json` has the source of each."""
    models = json.loads(data_text("dlrm_models.json"))["models"]
    return {name: _model(document) for name, document in models.items()}


def load_dlrm(what: str | Path) -> Dlrm:
    """Returns a known recommendation model by name, or the model of a JSON file.

    The file has the fields of `Dlrm`. Instead of `tables`, it has two lists with a number for each
    table: `rows`, and `ids` if bags may have more than one id. Raises ValueError for an unknown
    name and for other content.

    >>> load_dlrm("dlrm-mlperf").dense_parameters
    2368897
    """
    path = Path(what)
    if path.suffix == ".json":
        with reading(path) as text:
            return _model(json.loads(text))
    found = _known().get(str(what).lower())
    if found is None:
        near = difflib.get_close_matches(str(what).lower(), _known(), cutoff=0.3)
        raise ValueError(
            f"no recommendation model is named {str(what)!r}; near: {', '.join(near or _known())}"
        )
    return found


def is_dlrm(what: str | Path) -> bool:
    """Returns True for a name that begins with "dlrm", and for the file of a recommendation model.

    >>> is_dlrm("dlrm-mlperf"), is_dlrm("gpt3-175b")
    (True, False)
    """
    path = Path(what)
    if path.suffix != ".json":
        return str(what).lower().startswith("dlrm")
    with reading(path) as text:
        document = json.loads(text)
    return isinstance(document, dict) and "rows" in document


def _model(document: Any) -> Dlrm:
    if not isinstance(document, dict) or not {"rows", "counters", "width"} <= set(document):
        raise ValueError(
            "a recommendation model is a JSON object with rows, counters, width, bottom and top"
        )
    unknown = sorted(set(document) - {*_SIZES, "rows", "ids", "source"})
    if unknown:
        raise ValueError(f"unknown fields of a recommendation model: {', '.join(unknown)}")
    rows = document["rows"]
    ids = document.get("ids", [1] * len(rows))
    if len(ids) != len(rows):
        raise ValueError(f"ids: expected a number for each of {len(rows)} tables, got {len(ids)}")
    sizes = {name: document[name] for name in _SIZES if name in document}
    for name in ("bottom", "top"):
        sizes[name] = tuple(sizes.get(name, ()))
    tables = tuple(TableShape(rows=r, ids=i) for r, i in zip(rows, ids, strict=True))
    return Dlrm(tables=tables, **sizes)
