"""The errors that led to an error."""

from __future__ import annotations

from collections.abc import Iterator


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, its cause, the cause of that error and so on, each once.

    An error that is raised again while an error that it caused is handled is its own cause.
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__
