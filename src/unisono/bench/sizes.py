"""Message sizes in human notation: `8`, `64K`, `1.5M`, `8:64M:x8`."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Returns the bytes of a size such as `64K`. Units are powers of two.

    >>> parse_size("1.5M")
    1572864
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a size: {text!r} (examples: 8, 64K, 1.5M, 2G)")
    number, unit = match.groups()
    size_bytes = float(number) * _UNITS[unit.upper()]
    if not size_bytes.is_integer():
        raise ValueError(f"not a whole number of bytes: {text!r}")
    return int(size_bytes)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Returns the bytes of a comma-separated list of sizes and of ranges `first:last[:xFACTOR]`,
    with a default factor of 2.

    >>> parse_sizes("8,1K:16K:x4")
    (8, 1024, 4096, 16384)
    """
    sizes: list[int] = []
    for item in text.split(","):
        sizes.extend(_parse_range(item) if ":" in item else [parse_size(item)])
    return tuple(sizes)


def _parse_range(text: str) -> list[int]:
    bounds = text.split(":")
    if len(bounds) not in (2, 3):
        raise ValueError(f"not a range: {text!r} (example: 8:64M:x8)")
    first, last = parse_size(bounds[0]), parse_size(bounds[1])
    factor = _parse_factor(bounds[2]) if len(bounds) == 3 else 2.0
    if first <= 0 or last < first:
        raise ValueError(f"a range must increase and start above 0: {text!r}")
    sizes, size = [], float(first)
    while size <= last:
        sizes.append(round(size))
        size *= factor
    return sizes


def _parse_factor(text: str) -> float:
    try:
        factor = float(text.strip().lower().removeprefix("x"))
    except ValueError:
        factor = 0.0
    if factor <= 1.0:
        raise ValueError(f"the factor of a range must be a number above 1: {text!r} (example: x8)")
    return factor


def format_size(size_bytes: int) -> str:
    """Returns the shortest exact text of a size.

    >>> format_size(65536), format_size(1000)
    ('64K', '1000')
    """
    for unit in ("G", "M", "K"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]}{unit}"
    return str(size_bytes)
