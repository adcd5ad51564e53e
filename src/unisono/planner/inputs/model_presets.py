"""Known models by name, and models of files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from unisono.planner.data_files import data_text
from unisono.planner.inputs.hugging_face import from_hugging_face
from unisono.planner.inputs.transformer import Transformer
from unisono.text_files import reading

_KINDS = re.compile(r"-(base|chat|hf|instruct|it|pt)$")
"""Endings of names that do not change a model's sizes."""


@cache
def _entries() -> Mapping[str, Any]:
    entries: Mapping[str, Any] = json.loads(data_text("models.json"))["models"]
    return entries


@cache
def _names() -> Mapping[str, str]:
    """Returns the names by their keys."""
    return {_key(name): name for name in _entries()}


@cache
def _preset(name: str) -> Transformer:
    entry = _entries()[name]
    return _preset(entry) if isinstance(entry, str) else from_hugging_face(entry)


class _Presets(Mapping[str, Transformer]):
    """The models of `data/models.json`, each made when it is asked for."""

    def __getitem__(self, name: str) -> Transformer:
        return _preset(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_entries())

    def __len__(self) -> int:
        return len(_entries())


PRESETS: Mapping[str, Transformer] = _Presets()
"""Known models. `data/models.json` has their configurations and sources."""


def _key(name: str) -> str:
    """Returns a name without its owner, its ending, and punctuation other than points.

    >>> _key("meta-llama/Llama-3.1-70B-Instruct")
    'llama3.170b'
    """
    last = name.lower().rsplit("/", 1)[-1]
    last = _KINDS.sub("", last).removeprefix("meta-")
    return re.sub(r"[^a-z0-9.]", "", last)


def model_named(name: str) -> Transformer:
    """Returns a known model. Raises ValueError for an unknown name, with the nearest names.

    Case, punctuation, the owner before "/" and endings such as "-instruct" do not matter.

    >>> model_named("llama3-8b").kv_heads, model_named("meta-llama/Llama-3-8B-Instruct").kv_heads
    (8, 8)
    >>> model_named("lama3-8b")
    Traceback (most recent call last):
    ValueError: no model is named 'lama3-8b'; near: llama3-8b, llama3.1-8b, llama3-70b
    """
    found = _names().get(_key(name))
    if found is None:
        import difflib

        near = difflib.get_close_matches(name.lower(), PRESETS, cutoff=0.3)
        raise ValueError(f"no model is named {name!r}; near: {', '.join(near or PRESETS)}")
    return PRESETS[found]


def load_model(what: str | Path) -> Transformer:
    """Returns a known model by name, or the model of a Hugging Face `config.json`.

    Raises ValueError for an unknown name and for a file without the sizes of a transformer.

    >>> load_model("gpt3-175b").layers
    96
    """
    path = Path(what)
    if path.suffix != ".json":
        return model_named(str(what))
    with reading(path) as text:
        return from_hugging_face(json.loads(text))
