"""The tables that the package ships."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).with_name("data")


def data_text(name: str) -> str:
    """Returns the text of a file of the folder `data`.

    >>> data_text("constants.json").startswith("{")
    True
    """
    return (_FOLDER / name).read_text(encoding="utf-8")
