"""Parses environment variables from a mapping; errors name the variable."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

from unisono.errors import RendezvousError

_log = logging.getLogger(__name__)
_OURS = "UNISONO_"


def text(environ: Mapping[str, str], name: str) -> str:
    """Returns the variable's value. Raises `RendezvousError` if the variable is not set."""
    if name not in environ:
        raise RendezvousError(f"{name} is not set")
    return environ[name]


def number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Returns a whole number. Raises `ValueError` for any other value.

    >>> number({"UNISONO_RANK": "3"}, "UNISONO_RANK"), number({}, "UNISONO_RANK", 0)
    (3, 0)
    """
    if name not in environ and default is not None:
        return default
    try:
        return int(text(environ, name))
    except ValueError:
        raise ValueError(f"{name} must be a whole number, not {environ[name]!r}") from None


def seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    """Returns a number of seconds. Raises `ValueError` for any other value."""
    if name not in environ:
        return default
    try:
        return float(environ[name])
    except ValueError:
        raise ValueError(f"{name} must be a number of seconds, not {environ[name]!r}") from None


def switch(environ: Mapping[str, str], name: str) -> bool:
    """Returns True if the variable is 1, False if it is 0 or not set. Raises `ValueError` for any
    other value."""
    given = environ.get(name, "0")
    if given not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, not {given!r}")
    return given == "1"


def warn_of_unknown(names: Iterable[str], known: Collection[str]) -> None:
    """Logs each unknown variable that has unisono's prefix, with the most similar known name."""
    for name in names:
        if name.startswith(_OURS) and name not in known:
            import difflib  # most processes never need this module

            (nearest,) = difflib.get_close_matches(name, known, 1, cutoff=0)
            _log.warning("%s is not a variable that unisono reads: is it %s?", name, nearest)
