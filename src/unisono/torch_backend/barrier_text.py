"""The text of a monitored barrier's timeout: Gloo's sentence, then the cause."""

from __future__ import annotations

import re
from datetime import timedelta

_LATE = re.compile(r"rank (\d+) has not arrived")


def barrier_text(cause: str, rank: int, timeout: timedelta | None, all_ranks: bool) -> str:
    """Returns the text of a rank's error.

    `cause` is the text of the barrier's timeout. With `all_ranks`, the sentence names all ranks
    that have not arrived, as Gloo's does; otherwise the first.

    >>> cause = "barrier(): timeout after 1 s on rank 0: rank 1 has not arrived, it made no call"
    >>> barrier_text(cause, 0, timedelta(seconds=1), False).partition(". ")[0]
    'Rank 1 failed to pass monitoredBarrier in 1000 ms'
    """
    if rank != 0:
        return (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
            f"for send/recv from rank 0. {cause}"
        )
    late = _LATE.findall(cause)
    named = f"Rank {late[0]}" if late else "A rank"
    if all_ranks and late:
        named = f"Ranks {', '.join(late)}"
    limit = "" if timeout is None else f" in {round(timeout / timedelta(milliseconds=1))} ms"
    ended = f"Rank {rank} timed out in monitoredBarrier"
    return f"{named} failed to pass monitoredBarrier{limit}. {ended}: {cause}"
