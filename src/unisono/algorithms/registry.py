"""Which algorithm serves which operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from unisono.errors import UnsupportedError
from unisono.schedule import MAX_RANKS, Schedule
from unisono.types import Op


class Flat(Protocol):
    """An algorithm of an operation without a root."""

    def __call__(self, ranks: int) -> Schedule: ...


class Rooted(Protocol):
    """An algorithm of an operation with a root."""

    def __call__(self, ranks: int, root: int) -> Schedule: ...


F = TypeVar("F", bound=Flat)
R = TypeVar("R", bound=Rooted)

_FLAT: dict[tuple[Op, str], Flat] = {}
_ROOTED: dict[tuple[Op, str], Rooted] = {}


def algorithm(op: Op, name: str) -> Callable[[F], F]:
    """Register a function of the rank count as the algorithm `name` of `op`."""

    def register(function: F) -> F:
        _FLAT[op, name] = function
        return function

    return register


def rooted_algorithm(op: Op, name: str) -> Callable[[R], R]:
    """Register a function of the rank count and the root as the algorithm `name` of `op`."""

    def register(function: R) -> R:
        _ROOTED[op, name] = function
        return function

    return register


def names(op: Op | str) -> tuple[str, ...]:
    """The algorithms that serve an operation, in alphabetical order.

    >>> import unisono.algorithms
    >>> "one_shot" in unisono.algorithms.names("all_reduce")
    True
    """
    op = _operation(op)
    return tuple(sorted(name for served, name in (*_FLAT, *_ROOTED) if served is op))


def build(op: Op | str, name: str, *, ranks: int, root: int = 0) -> Schedule:
    """The schedule of an algorithm. `root` is ignored by operations without one.

    Raises `UnsupportedError` when there is no such operation or algorithm, or when it cannot
    serve this many ranks.

    >>> import unisono.algorithms
    >>> unisono.algorithms.build("all_reduce", "one_shot", ranks=4).num_rounds
    1
    """
    op = _operation(op)
    if not 1 <= ranks <= MAX_RANKS:
        raise UnsupportedError(f"{op}: {ranks} ranks; must be 1..{MAX_RANKS}")
    if (op, name) in _FLAT:
        return _FLAT[op, name](ranks=ranks)
    if (op, name) in _ROOTED:
        if not 0 <= root < ranks:
            raise UnsupportedError(f"{op}: root {root} is not one of {ranks} ranks")
        return _ROOTED[op, name](ranks=ranks, root=root)
    raise UnsupportedError(
        f"{op} has no algorithm {name!r}; the algorithms are {', '.join(names(op))}"
    )


def _operation(op: Op | str) -> Op:
    try:
        return Op(op)
    except ValueError:
        raise UnsupportedError(
            f"there is no operation {op!r}; the operations are {', '.join(Op)}"
        ) from None
