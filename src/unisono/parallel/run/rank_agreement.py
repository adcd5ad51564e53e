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
    result: Any = None
    error: ValueError | None = None
    try:
        result = found()
    except ValueError as caught:
        error = caught
    texts = of_all_ranks(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise ValueError(f"rank {rank}: {text}")
    return result  # type: ignore[no-any-return]


def of_all_ranks(own: object) -> list[Any]:
    """Returns the objects of all ranks of torch's default group, by rank; the own one alone without
    a group. Collective."""
    if not dist.is_initialized():
        return [own]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def require_equal(arguments: Mapping[str, str]) -> None:
    """Raises `ValueError` on all ranks unless all pass the same arguments, as texts. Collective."""
    first, *others = of_all_ranks(dict(arguments))
    for rank, other in enumerate(others, 1):
        for name, text in first.items():
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
