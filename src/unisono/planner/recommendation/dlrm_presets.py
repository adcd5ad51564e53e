"""Known recommendation models by name, and models of JSON files."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from unisono.planner.data_files import data_text
from unisono.planner.recommendation.dlrm_shape import Dlrm, TableShape
from unisono.text_files import reading

_SIZES = ("counters", "width", "bottom", "top", "interaction", "cross_layers", "cross_rank")


@cache
def dlrm_presets() -> Mapping[str, Dlrm]:
    """Returns the known models. `data/dlrm_models.json` has the source of each.

    >>> len(dlrm_presets()["dlrm-mlperf"].tables)
    26
    """
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
    found = dlrm_presets().get(str(what).lower())
    if found is None:
        near = difflib.get_close_matches(str(what).lower(), dlrm_presets(), cutoff=0.3)
        known = ", ".join(near or dlrm_presets())
        raise ValueError(f"no recommendation model is named {str(what)!r}; near: {known}")
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
