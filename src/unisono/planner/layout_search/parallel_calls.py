"""Calls of one function with many arguments, on the workers of an executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from unisono.launch import Executor

Result = TypeVar("Result")


def results_of(
    fn: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], executor: Executor | None
) -> list[Result]:
    """Returns the results of `fn(*each)` for all arguments, in their order.

    Without an executor, this process makes the calls. After an error of a call, the calls that have
    not begun are cancelled.

    >>> results_of(pow, [(2, 3), (3, 2)], None)
    [8, 9]
    """
    if executor is None:
        return [fn(*each) for each in arguments]
    futures = [executor.submit(fn, *each) for each in arguments]
    try:
        return [each.result() for each in futures]
    except BaseException:
        for each in futures:
            each.cancel()
        raise
