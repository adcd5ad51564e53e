"""Where a rank can be reached by those of other hosts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """A rank of the world, and the addresses it listens on: IP literal and port, one for each rail,
    in the order of the rails."""

    rank: int
    host: int
    addresses: tuple[tuple[str, int], ...]
