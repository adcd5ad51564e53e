"""Values of environment variables, out of a mapping; errors name the variable."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping

from unisono.errors import RendezvousError

_log = logging.getLogger(__name__)
_OURS = "UNISONO_"


def text(environ: Mapping[str, str], name: str) -> str:
    """The value as it is. Raises `RendezvousError` if there is none."""
    if name not in environ:
        raise RendezvousError(f"{name} is not set")
    return environ[name]


def number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A whole number. Raises `ValueError` for anything else.

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
    """A time. Raises `ValueError` for what is no number."""
    if name not in environ:
        return default
    try:
        return float(environ[name])
    except ValueError:
        raise ValueError(f"{name} must be a number of seconds, not {environ[name]!r}") from None


def switch(environ: Mapping[str, str], name: str) -> bool:
    """On (1) or off (0, or not set). Raises `ValueError` for anything else."""
    given = environ.get(name, "0")
    if given not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, not {given!r}")
    return given == "1"


def warn_of_unknown(names: Iterable[str], known: Collection[str]) -> None:
    """Names what looks like a variable of ours and is none, with the nearest that is."""
    for name in names:
        if name.startswith(_OURS) and name not in known:
            import difflib  # which most processes never need

            (nearest,) = difflib.get_close_matches(name, known, 1, cutoff=0)
            _log.warning("%s is not a variable that unisono reads: is it %s?", name, nearest)
