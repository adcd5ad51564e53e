"""Slurm's compact notation of many host names: `rack[1-2]n[01-16],login`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_ENTRY = re.compile(r"(?:[^\[\],\s]+|\[[\d,-]+\])+")
_PIECE = re.compile(r"([^\[\],\s]+)|\[([\d,-]+)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers from `first` to `last`, written with at least `width` digits."""

    first: int
    last: int
    width: int

    def __iter__(self) -> Iterator[str]:
        return (f"{n:0{self.width}}" for n in range(self.first, self.last + 1))


_Piece = Sequence[str | _Numbers]  # the possible texts of one section of a host name


def hosts(text: str) -> Iterator[str]:
    """Yields the host names of a host list, in order. Does not make the whole list first.

    Numbers keep the leading zeros of the first number of their range. Raises `ValueError` if `text`
    is not a host list, before any name is yielded.

    >>> list(hosts("n[08-10,12],login")), next(hosts("rack[1-2]n[1-9]"))
    (['n08', 'n09', 'n10', 'n12', 'login'], 'rack1n1')
    """
    entries = re.split(r",(?![^\[]*\])", text)  # splits at commas outside of brackets
    if not all(_ENTRY.fullmatch(entry) for entry in entries):
        raise ValueError(f"{text!r} is not a list of hosts such as n[01-16],login")
    patterns = [[_piece(match) for match in _PIECE.finditer(entry)] for entry in entries]
    return (name for pattern in patterns for name in _names(pattern))


def _piece(match: re.Match[str]) -> _Piece:
    name, ranges = match.groups()
    return [name] if name else [_numbers(part) for part in ranges.split(",")]


def _numbers(text: str) -> _Numbers:
    match = _RANGE.fullmatch(text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ValueError(f"[{text}] is not a range of hosts such as 01-16")
    return _Numbers(int(match[1]), int(match[2] or match[1]), len(match[1]))


def _names(pattern: Sequence[_Piece]) -> Iterator[str]:
    """Yields a host name for each combination of the sections' possible texts. The last section
    changes fastest.
    """
    if not pattern:
        yield ""
        return
    for alternative in pattern[0]:
        for text in [alternative] if isinstance(alternative, str) else alternative:
            for rest in _names(pattern[1:]):
                yield text + rest
