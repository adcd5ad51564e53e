"""A schedule with what its rounds do, as plain data for other programs."""

from __future__ import annotations

import json

from unisono.schedule import to_json
from unisono.show.schedule_view import RoundView, ScheduleView

FORMAT = "unisono-show"


def document(story: ScheduleView) -> dict[str, object]:
    """The schedule, in the form of `schedule.to_json`, and each round that has transfers.

    Counts are chunks, ranks and chunks are numbers; `chunk_bytes` is null unless a size was given.
    A round's `writes` say what places hold from then on, with the ranks that have contributed.

    >>> from unisono.algorithms import build
    >>> from unisono.show import view
    >>> document(view(build("broadcast", "chain", ranks=2)))["rounds"][0]["links"]
    [{'src': 0, 'dst': 1, 'chunks': 1}]
    """
    nbytes = story.scale.nbytes
    return {
        "format": FORMAT,
        "title": story.title,
        "summary": story.summary,
        "source": story.source,
        "problem": story.problem,
        "facts": dict(story.facts),
        "chunk_bytes": None if nbytes is None else nbytes / story.scale.chunks,
        "rounds": [_round(story, scene) for scene in story.scenes],
        "schedule": json.loads(to_json(story.schedule)),
    }


def _round(story: ScheduleView, scene: RoundView) -> dict[str, object]:
    ranks = range(story.schedule.collective.ranks)
    return {
        "round": scene.number,
        "kind": scene.kind,
        "sent": [scene.sent[rank] for rank in ranks],
        "links": [
            {"src": src, "dst": dst, "chunks": count} for (src, dst), count in scene.links.items()
        ],
        "writes": [
            {
                "rank": rank,
                "location": location,
                "chunk": held.chunk,
                "contributors": [r for r in ranks if held.mask >> r & 1],
            }
            for (rank, location), held in scene.played.writes.items()
        ],
        "done": scene.done,
    }
