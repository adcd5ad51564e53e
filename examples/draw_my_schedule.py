"""Defines a new algorithm, proves it correct, and draws it.

Covers: `schedule.Builder`, `schedule.check`, `show.view`, `show.svg`, `show.html`.
Scenario: an all-reduce along a chain of ranks and back. The drawing shows why rings are faster.

    python examples/draw_my_schedule.py chain.html
"""

import sys
from pathlib import Path
from tempfile import mkdtemp

from unisono import schedule, show
from unisono.types import Op

RANKS = 4
MESSAGE_BYTES = 64 << 20


def chain(ranks):
    """Returns a schedule that sums along the chain to the last rank, and sends the result back."""
    b = schedule.Builder(schedule.Collective(op=Op.ALL_REDUCE, ranks=ranks), "chain")
    for rank in range(ranks - 1):
        b.reduce(rank, 0, rank + 1)
        b.next_round()
    for rank in reversed(range(ranks - 1)):
        b.copy(rank + 1, 0, rank)
        b.next_round()
    return b.build()


def main():
    mine = chain(RANKS)
    schedule.check(mine)  # raises ScheduleError with rank, chunk and round if the schedule is wrong
    view = show.view(mine, nbytes=MESSAGE_BYTES)
    page = Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp() + "/chain.html")
    page.write_text(show.html(view), encoding="utf-8")
    page.with_suffix(".svg").write_text(show.svg(view), encoding="utf-8")
    print(f"{view.title}: {dict(view.facts)}")
    print(f"open {page} and {page.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
