"""Returns a schedule and the effect of its rounds as plain data for other programs."""

from __future__ import annotations

import json

from unisono.schedule import to_json
from unisono.show.schedule_view import RoundView, ScheduleView

FORMAT = "unisono-show"


def document(view: ScheduleView) -> dict[str, object]:
    """Returns the schedule, in the format of `schedule.to_json`, and the rounds that have
    transfers.

    Counts are in chunks; ranks and chunks are numbers. `chunk_bytes` is null unless a size was
    given. The `writes` of a round are the new contents of locations, with the ranks that
    contributed.

    >>> from unisono.algorithms import build
    >>> from unisono.show import view
    >>> document(view(build("broadcast", "chain", ranks=2)))["rounds"][0]["links"]
    [{'src': 0, 'dst': 1, 'chunks': 1}]
    """
    nbytes = view.scale.nbytes
    return {
        "format": FORMAT,
        "title": view.title,
        "summary": view.summary,
        "source": view.source,
        "problem": view.problem,
        "facts": dict(view.facts),
        "chunk_bytes": None if nbytes is None else nbytes / view.scale.chunks,
        "rounds": [_round(view, round_) for round_ in view.rounds],
        "schedule": json.loads(to_json(view.schedule)),
    }


def _round(view: ScheduleView, round_: RoundView) -> dict[str, object]:
    ranks = range(view.schedule.collective.ranks)
    return {
        "round": round_.number,
        "kind": round_.kind,
        "sent": [round_.sent[rank] for rank in ranks],
        "links": [
            {"src": src, "dst": dst, "chunks": count} for (src, dst), count in round_.links.items()
        ],
        "writes": [
            {
                "rank": rank,
                "location": location,
                "chunk": held.chunk,
                "contributors": [r for r in ranks if held.mask >> r & 1],
            }
            for (rank, location), held in round_.replayed.writes.items()
        ],
        "done": round_.done,
    }
