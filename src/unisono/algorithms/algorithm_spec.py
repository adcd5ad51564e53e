"""Parser of strings that name an algorithm and its parameters.

    ring                             a name
    k_nomial:4                       a name and the value of the first parameter
    bucket:4x4                       the sizes of a grid, the innermost (fastest) axis first
    ring:channels=2                  parameters by name, separated by commas
    level0:mesh;level1:ring          an algorithm for each level, the innermost level first
    level0:mesh@4;level1:ring@2      an algorithm and a size for each level

The last two forms follow HCCL's syntax (`HCCL_ALGO`). The sizes are an extension of this syntax.
The parser also accepts HCCL's names of algorithms, in upper or lower case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from unisono.errors import UnsupportedError
from unisono.types import Op

Dims: TypeAlias = tuple[int, ...]
"""Sizes of the axes of a grid of ranks. Ranks are numbered along axis 0 first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of a hierarchy: the algorithm's string and, if given, the number of ranks."""

    algorithm: str
    size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A parsed algorithm string. All parameters except the levels are still text."""

    name: str
    positional: tuple[str, ...] = ()
    named: tuple[tuple[str, str], ...] = ()
    levels: tuple[Level, ...] = ()


_ALIASES = {
    "mesh": "direct",
    "fullmesh": "direct",
    "na": "direct",
    "h-d_r": "halving_doubling",
    "rabenseifner": "halving_doubling",
    "nb": "bruck",
    "torus": "bucket",
    "neighbor_exchange": "neighbour_exchange",
}
_HALVES = {
    (Op.REDUCE_SCATTER, "halving_doubling"): "recursive_halving",
    (Op.ALL_GATHER, "halving_doubling"): "recursive_doubling",
}
_NAMED = re.compile(r"([a-z_]+)=(.*)", re.DOTALL)
_LEVEL = re.compile(r"level(\d+):(.*)", re.DOTALL | re.IGNORECASE)


def parse(op: Op, text: str) -> Spec:
    """Parses an algorithm's string. Raises `UnsupportedError` for an invalid string.

    >>> parse(Op.ALL_REDUCE, "k_nomial:4")
    Spec(name='k_nomial', positional=('4',), named=(), levels=())
    >>> parse(Op.ALL_REDUCE, "level0:mesh@4;level1:ring").levels
    (Level(algorithm='mesh', size=4), Level(algorithm='ring', size=None))
    """
    text = text.strip()
    if _LEVEL.match(text):
        return Spec(name="hierarchical", levels=tuple(_levels(text)))
    head, colon, rest = text.partition(":")
    positional: list[str] = []
    named: dict[str, str] = {}
    for part in rest.split(",") if colon else ():
        match = _NAMED.fullmatch(part.strip())
        if match is None and (named or not part.strip()):
            raise UnsupportedError(
                f"{text!r}: expected values after ':', then key=value, separated by commas"
            )
        if match is None:
            positional.append(part.strip())
        elif match[1] in named:
            raise UnsupportedError(f"{text!r}: expected {match[1]} once, got it twice")
        else:
            named[match[1]] = match[2].strip()
    name = _canonical(op, head.strip())
    return Spec(name=name, positional=tuple(positional), named=tuple(named.items()))


def number(what: str, text: str) -> int:
    """Parses a whole number of at least one. Raises `UnsupportedError` for any other text."""
    if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
        raise UnsupportedError(f"{what}: expected a whole number like 4, got {text!r}")
    return int(text)


def dims(what: str, text: str) -> Dims:
    """Parses sizes such as 4x4. Raises `UnsupportedError` for any other text.

    >>> dims("bucket", "4x2")
    (4, 2)
    """
    if not re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*", text):
        raise UnsupportedError(f"{what}: expected sizes like 4x4, got {text!r}")
    return tuple(int(size) for size in text.split("x"))


def check_dims(sizes: Dims, ranks: int) -> Dims:
    """Returns the sizes. Raises `UnsupportedError` unless their product is the number of ranks."""
    if prod(sizes) != ranks:
        shape = "x".join(map(str, sizes))
        raise UnsupportedError(f"a grid of {shape} has {prod(sizes)} ranks, expected {ranks}")
    return sizes


def _canonical(op: Op, name: str) -> str:
    name = name.lower()
    name = _ALIASES.get(name, name)
    return _HALVES.get((op, name), name)


def _levels(text: str) -> Iterator[Level]:
    for expected, part in enumerate(text.split(";")):
        match = _LEVEL.fullmatch(part.strip())
        if match is None or int(match[1]) != expected:
            raise UnsupportedError(
                f"{text!r}: expected 'level{expected}:ALGORITHM' or "
                f"'level{expected}:ALGORITHM@SIZE', got {part!r}"
            )
        algorithm, at, size = match[2].partition("@")
        yield Level(
            algorithm=algorithm.strip(),
            size=number(f"level{expected} after '@'", size.strip()) if at else None,
        )
