"""A rank that cannot make sense of its arguments tells the others, which wait for it."""

from __future__ import annotations

import functools
import time
from contextlib import suppress
from typing import Any, Final

from unisono.errors import UnsupportedError

# Ranks that make the same mistake make it within this time of each other, or are out of step.
_GRACE_S: Final = 0.5
_POLL_S: Final = 0.005


def tells_refusals(method: Any) -> Any:
    """Let a collective of the process group tell all ranks when one refuses its arguments.

    Wrong lengths are often seen by one rank alone: its last batch is smaller, or it is the root.
    The others would wait for it until the timeout. If all ranks refuse, it was a mistake of the
    program that harmed nothing, and the group stays usable; else the group fails on all ranks with
    this rank's reason. What is not supported (`UnsupportedError`) is so on all ranks alike, and is
    not told.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except ValueError as error:
            tell_refusal(self, method.__name__, error)
            raise

    return call


def tell_refusal(group: Any, name: str, error: ValueError) -> None:
    """Tell the ranks of `group` that this one refuses its call. For calls too hot to be wrapped."""
    if isinstance(error, UnsupportedError) or getattr(error, "was_told", False):
        return
    error.was_told = True  # type: ignore[attr-defined]
    group.refusals += 1
    key = f"unisono/refused/{group.group_name}/{group.refusals}"
    if not _all_refuse(group.store, key, group.communicator.size):
        group.communicator.abort(f"{name} was refused: {error}")


def _all_refuse(store: Any, key: str, ranks: int) -> bool:
    """Whether every rank comes here within the time of grace."""
    with suppress(RuntimeError, AttributeError):  # no store, or one whose server has gone
        deadline = time.monotonic() + _GRACE_S
        count: int = store.add(key, 1)
        while count < ranks and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            count = store.add(key, 0)
        return count >= ranks
    return False
