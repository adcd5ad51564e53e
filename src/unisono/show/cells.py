"""Maps the memory locations of a schedule to cells of a picture, and names cells and chunks.

Each rank has a row of cells, usually one cell per chunk. In an all-to-all a rank uses few of the n
x n chunks, so its cells are the pieces that it must receive, ordered by source. The last cells are
scratch memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.schedule import Collective, Schedule
from unisono.types import Op

_COLOR_NAMES = {
    Op.ALL_GATHER: "from rank {}",
    Op.GATHER: "from rank {}",
    Op.ALL_TO_ALL: "from rank {}",
    Op.REDUCE_SCATTER: "for rank {}",
    Op.SCATTER: "for rank {}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """The cells of a schedule: the names of the columns, and the location of each rank in each
    column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, schedule: Schedule) -> Cells:
        """Returns the cells of a schedule."""
        collective = schedule.collective
        chunks = collective.num_chunks
        scratch = tuple(range(chunks, schedule.num_locations))
        ranks = range(collective.ranks)
        if collective.op is Op.ALL_TO_ALL:
            wanted = [tuple(collective.wanted(rank)) for rank in ranks]
            names = [label(schedule, chunk).split(":")[0] for chunk in wanted[0]]
            if collective.parts > 1:
                names = [f"{name}.{i % collective.parts}" for i, name in enumerate(names)]
        else:
            wanted = [tuple(range(chunks))] * collective.ranks
            names = [label(schedule, chunk) for chunk in range(chunks)]
        return cls(
            columns=(*names, *(label(schedule, location) for location in scratch)),
            rows=tuple((*row, *scratch) for row in wanted),
        )


def label(schedule: Schedule, location: int) -> str:
    """Returns the label of a location: the number of a chunk or rank, `source:destination`, or
    `s0`, `s1` ... for scratch memory.

    >>> from unisono.algorithms import build
    >>> label(build("all_to_all", "direct", ranks=4), 6)
    '1:2'
    """
    collective = schedule.collective
    if location >= collective.num_chunks:
        return f"s{location - collective.num_chunks}"
    piece, part = divmod(location, collective.parts)
    name = str(piece)
    if collective.op is Op.ALL_TO_ALL:
        name = "{}:{}".format(*divmod(piece, collective.ranks))
    elif collective.op not in _COLOR_NAMES:
        return str(part)
    return f"{name}.{part}" if collective.parts > 1 else name


def num_colors(collective: Collective) -> int:
    """Returns the number of colours: one per rank if each chunk belongs to a rank, else one per
    chunk."""
    if collective.op in _COLOR_NAMES:
        return collective.ranks
    return max(1, collective.num_chunks)


def color_of(collective: Collective, chunk: int) -> int:
    """Returns the index of a chunk's colour."""
    if collective.op is Op.ALL_TO_ALL:
        return chunk // (collective.ranks * collective.parts)
    return chunk // collective.parts if collective.op in _COLOR_NAMES else chunk


def color_name(collective: Collective, color: int) -> str:
    """Returns the text of a colour in the legend: the property that the chunks of this colour
    share."""
    return _COLOR_NAMES.get(collective.op, "chunk {}").format(color)
