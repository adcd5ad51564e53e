"""The names of the spans that torch's profiler shows for calls of Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ASYNCHRONOUS = "gloo:"


def gloo_name(call: str, args: tuple[Any, ...] = ()) -> str:
    """Returns the name of Gloo's span for a call of the communicator with these arguments."""
    if call == "recv" and args[1] is None:
        return "gloo:recvAnySource"
    return f"{_ASYNCHRONOUS}{call}"


def asynchronous(parse: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Returns torch's function that reads a profile, with all spans of Gloo asynchronous.

    Gloo ends its spans on threads of its own, which torch reports as asynchronous. A span from
    Python ends on the thread where it began.
    """

    def parse_instead(*args: Any, **options: Any) -> list[Any]:
        events = parse(*args, **options)
        for event in events:
            if event.name.startswith(_ASYNCHRONOUS):
                event.is_async = True
        return events

    return parse_instead
