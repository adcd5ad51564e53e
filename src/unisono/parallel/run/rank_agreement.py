"""Errors that one rank finds, told to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import distributed as dist

_T = TypeVar("_T")


def on_all_ranks(found: Callable[[], _T]) -> _T:
    """Calls a function on all ranks, and returns its result. Collective.

    Raises `ValueError` on all ranks if the function raises it on one. Ranks on which the function
    raises nothing get the message of the first rank that it fails on.
    """
    if not dist.is_initialized():
        return found()
    result: Any = None
    error: ValueError | None = None
    try:
        result = found()
    except ValueError as caught:
        error = caught
    first = first_message(None if error is None else str(error))
    if error is not None:
        raise error
    if first is not None:
        raise ValueError(first)
    return result  # type: ignore[no-any-return]


def first_message(own: str | None) -> str | None:
    """Returns the message of the first rank that has one, with its number; None if no rank has.
    Collective.
    """
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, own)
    return next(
        (f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None), None
    )


def require_equal(arguments: Mapping[str, str]) -> None:
    """Raises `ValueError` on all ranks unless all pass the same arguments, as texts. Collective."""
    if not dist.is_initialized():
        return
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, dict(arguments))
    for rank, other in enumerate(found):
        for name, text in found[0].items():
            if other[name] != text:
                raise ValueError(
                    f"parallelize: expected one {name} on all ranks, got {text} on rank 0 and "
                    f"{other[name]} on rank {rank}"
                )


def of_rank_0(decide: Callable[[], _T]) -> _T:
    """Returns the result of a function on rank 0, on all ranks. Collective.

    For decisions that depend on this rank's part of a model, such as the cuts of a pipeline, which
    ranks of `tp` would make at different places. Raises the `ValueError` of rank 0 on all ranks.
    """
    if not dist.is_initialized():
        return decide()
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = decide()
        except ValueError as error:
            found[1] = str(error)
    dist.broadcast_object_list(found, src=0)
    result, refusal = found
    if refusal is not None:
        raise ValueError(refusal)
    return result  # type: ignore[no-any-return]
