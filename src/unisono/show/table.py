"""A schedule as a table for the terminal: one row per round."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from unisono.show.schedule_view import RoundView, ScheduleView
from unisono.show.transfer_text import lines

ROUNDS = 32
"""Maximum number of rounds; of more rounds, those in the middle are omitted."""
_HEAD, _TAIL = 20, 8
_ENTRIES = 16
_LEAST_WIDTH = 14
"""Minimum width of the column of transfers in a narrow terminal."""
_LEGEND = (
    "0→1: 3+ rank 0 sends chunk 3 to rank 1, which reduces it into its own; without + it copies"
)
_PIECES = "2:5 is the piece of rank 2 for rank 5"


def table(view: ScheduleView, *, every: bool = False) -> RenderableType:
    """Returns the facts and rounds of a schedule. With `every`, all rounds and all transfers are
    listed.

    >>> from rich.console import Console
    >>> from unisono import algorithms, show
    >>> view = show.view(algorithms.build("all_gather", "direct", ranks=2))
    >>> with (console := Console(width=100)).capture() as printed:
    ...     console.print(show.table(view))
    >>> next(line for line in printed.get().splitlines() if line.startswith("    0"))
    '    0 │ copy │ 0→1: 0  1→0: 1 │          N/2 │  4/4'
    """
    parts: list[RenderableType] = [Text(view.title, style="bold")]
    if view.summary:
        parts.append(Text(view.summary))
    parts.append(Text(" · ".join(f"{name} {value}" for name, value in view.facts)))
    if view.scale.nbytes is None and view.rounds:
        parts.append(
            Text("N is the size of a rank's larger buffer; --size gives bytes", style="dim")
        )
    if view.source:
        parts.append(Text(f"Source: {view.source}", style="dim"))
    if view.rounds:
        parts += ["", _rows(view, every), Text(_legend(view), style="dim")]
    else:
        parts.append(Text("It has no transfers."))
    if view.problem is not None:
        parts.append(Text(f"WRONG: {view.problem}", style="bold red"))
    return Group(*parts)


def _rows(view: ScheduleView, every: bool) -> Table:
    grid = Table(show_edge=False, pad_edge=False)
    grid.add_column("round", justify="right", no_wrap=True)
    grid.add_column("kind", no_wrap=True)
    grid.add_column("transfers", ratio=1, min_width=_LEAST_WIDTH)
    grid.add_column("a rank sends", justify="right", no_wrap=True)
    grid.add_column("done", justify="right", no_wrap=True)
    rounds = view.rounds
    hidden = 0 if every or len(rounds) <= ROUNDS else len(rounds) - _HEAD - _TAIL
    for round_ in rounds[:_HEAD] if hidden else rounds:
        grid.add_row(*_row(view, round_, every))
    if hidden:
        grid.add_row("…", "", Text(f"{hidden} more rounds; --all shows them", style="dim"))
        for round_ in rounds[-_TAIL:]:
            grid.add_row(*_row(view, round_, every))
    return grid


def _row(view: ScheduleView, round_: RoundView, every: bool) -> tuple[str, ...]:
    ranks = range(view.schedule.collective.ranks)
    found = lines(view.schedule, round_.transfers, limit=None if every else _ENTRIES)
    return (
        str(round_.number),
        round_.kind,
        "  ".join(found),
        view.scale.span(round_.sent[rank] for rank in ranks),
        f"{round_.done}/{view.wanted}",
    )


def _legend(view: ScheduleView) -> str:
    pieces = f"; {_PIECES}" if ":" in "".join(view.cells.columns) else ""
    return f"{_LEGEND}{pieces}; done: finished chunks at their final location"
