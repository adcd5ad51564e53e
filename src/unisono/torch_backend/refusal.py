"""A rank that cannot make sense of its arguments tells the others, which wait for it."""

from __future__ import annotations

import functools
from typing import Any


def tells_refusals(method: Any) -> Any:
    """Let a collective of the process group tell all ranks when one refuses its arguments.

    Wrong lengths are often seen by one rank alone: its last batch is smaller, or it is the root.
    What the communicator refuses it tells by itself; this is for what is seen before. If all ranks
    refuse, it was a mistake of the program that harmed nothing, and the group stays usable; else
    the ranks that go on raise `MismatchError` with this rank's reason.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except (ValueError, TypeError) as error:
            self.communicator.refuse(method.__name__, error)
            raise

    return call
