"""The rule that puts tensors into buckets. Each bucket is one message."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from unisono.controller.request import Request

DEFAULT_FUSION_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one message. All have the same operation, element type and reduction."""

    requests: tuple[Request, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in the order of their bytes in the message."""
        return tuple(request.name for request in self.requests)

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return sum(request.nbytes for request in self.requests)


def buckets_of(requests: Iterable[Request], fusion_bytes: int) -> tuple[Bucket, ...]:
    """Returns buckets of at most `fusion_bytes` each, in the order in which they are to run.

    Tensors are ordered by phase, then by priority (highest first), then as given. Tensors of
    different phases do not share a bucket, because a program may wait for one tensor before it
    submits the other. A tensor larger than `fusion_bytes` has its own bucket. The tensors of a
    group share a bucket of any size, in the latest phase of the group, but there is one bucket for
    each element type and reduction.

    >>> from unisono.types import DType
    >>> make = lambda name, count: Request(
    ...     name=name, operation="all_reduce", dtype=DType.FLOAT32, shape=(count,))
    >>> found = buckets_of([make("a", 4), make("b", 4), make("c", 8)], fusion_bytes=32)
    >>> [bucket.names for bucket in found]
    [('a', 'b'), ('c',)]
    """
    ordered = sorted(_together(requests), key=lambda request: (request.phase, -request.priority))
    found: list[list[Request]] = []
    open_buckets: dict[tuple[object, ...], list[Request]] = {}
    sizes: dict[tuple[object, ...], int] = {}
    for request in ordered:
        key = kind_of(request)
        size = sizes.get(key, 0) + request.nbytes
        if key not in open_buckets or (size > fusion_bytes and not request.group):
            open_buckets[key], size = [], request.nbytes
            found.append(open_buckets[key])
        open_buckets[key].append(request)
        sizes[key] = size
    return tuple(Bucket(tuple(bucket)) for bucket in found)


def _together(requests: Iterable[Request]) -> list[Request]:
    """Returns the requests, with the tensors of each group in the latest phase of their group."""
    found = list(requests)
    latest: dict[tuple[str, ...], int] = {}
    for request in found:
        latest[request.group] = max(request.phase, latest.get(request.group, 0))
    return [
        replace(request, phase=latest[request.group]) if request.group else request
        for request in found
    ]


def kind_of(request: Request) -> tuple[object, ...]:
    """Returns the properties that must be equal for tensors that share a bucket."""
    if not request.fuses:
        return (request.name,)
    return (request.operation, request.dtype, request.op, request.phase, request.group)
