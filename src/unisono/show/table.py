"""A schedule as a table for the terminal: one row a round."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from unisono.show.compact import lines
from unisono.show.schedule_view import RoundView, ScheduleView

ROUNDS = 32
"""More rounds than this are cut in the middle."""
_HEAD, _TAIL = 20, 8
_ENTRIES = 16
_LEAST_WIDTH = 14
"""Of the transfers, however narrow the terminal."""
_LEGEND = (
    "0→1: 3+ rank 0 sends chunk 3 to rank 1, which reduces it into its own; without + it copies"
)
_PIECES = "2:5 is the piece of rank 2 for rank 5"


def table(story: ScheduleView, *, every: bool = False) -> RenderableType:
    """The rounds of a schedule under its facts; `every` cuts nothing.

    >>> from rich.console import Console
    >>> from unisono import algorithms, show
    >>> story = show.view(algorithms.build("all_gather", "direct", ranks=2))
    >>> with (console := Console(width=100)).capture() as printed:
    ...     console.print(show.table(story))
    >>> next(line for line in printed.get().splitlines() if line.startswith("    0"))
    '    0 │ copy │ 0→1: 0  1→0: 1 │          N/2 │  4/4'
    """
    parts: list[RenderableType] = [Text(story.title, style="bold")]
    if story.summary:
        parts.append(Text(story.summary))
    parts.append(Text(" · ".join(f"{name} {value}" for name, value in story.facts)))
    if story.scale.nbytes is None and story.scenes:
        parts.append(Text("N is the larger buffer of a rank; --size gives bytes", style="dim"))
    if story.source:
        parts.append(Text(f"Source: {story.source}", style="dim"))
    if story.scenes:
        parts += ["", _rows(story, every), Text(_legend(story), style="dim")]
    else:
        parts.append(Text("It moves nothing."))
    if story.problem is not None:
        parts.append(Text(f"WRONG: {story.problem}", style="bold red"))
    return Group(*parts)


def _rows(story: ScheduleView, every: bool) -> Table:
    grid = Table(show_edge=False, pad_edge=False)
    grid.add_column("round", justify="right", no_wrap=True)
    grid.add_column("kind", no_wrap=True)
    grid.add_column("transfers", ratio=1, min_width=_LEAST_WIDTH)
    grid.add_column("a rank sends", justify="right", no_wrap=True)
    grid.add_column("done", justify="right", no_wrap=True)
    scenes = story.scenes
    hidden = 0 if every or len(scenes) <= ROUNDS else len(scenes) - _HEAD - _TAIL
    for scene in scenes[:_HEAD] if hidden else scenes:
        grid.add_row(*_row(story, scene, every))
    if hidden:
        grid.add_row("…", "", Text(f"{hidden} rounds more; --all shows them", style="dim"))
        for scene in scenes[-_TAIL:]:
            grid.add_row(*_row(story, scene, every))
    return grid


def _row(story: ScheduleView, scene: RoundView, every: bool) -> tuple[str, ...]:
    ranks = range(story.schedule.collective.ranks)
    found = lines(story.schedule, scene.transfers, limit=None if every else _ENTRIES)
    return (
        str(scene.number),
        scene.kind,
        "  ".join(found),
        story.scale.span(scene.sent[rank] for rank in ranks),
        f"{scene.done}/{story.wanted}",
    )


def _legend(story: ScheduleView) -> str:
    pieces = f"; {_PIECES}" if ":" in "".join(story.cells.columns) else ""
    return f"{_LEGEND}{pieces}; done: finished chunks where they must be in the end"
