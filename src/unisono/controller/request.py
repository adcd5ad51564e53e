"""Requests of ranks to run a collective on a named tensor, and the check that ranks agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.types import DType

OPERATIONS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all")

_AGREED = ("operation", "dtype", "shape", "op", "root", "group")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything that the ranks must agree on for the tensor `name`.

    `phase` and `priority` are advice on fusion. They may differ between ranks.
    """

    name: str
    operation: str
    dtype: DType
    shape: tuple[int, ...]
    op: str = "sum"
    root: int = -1
    group: tuple[str, ...] = ()
    """Names of the tensors that must run together with this tensor, including this tensor."""
    priority: int = 0
    """Priority among tensors that are ready at the same time. The highest priority runs first."""
    phase: int = 0
    """Number of times that the program waited for a tensor before it submitted this tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's tensor."""
        return math.prod(self.shape) * self.dtype.size_bytes

    @property
    def fuses(self) -> bool:
        """True if the tensor can share a message with other tensors."""
        return self.operation == "all_reduce"

    def encode(self, before: tuple[str, ...] = ()) -> list[Any]:
        """Returns the fields as JSON values. A group equal to `before`, the group of the previous
        request, becomes None.
        """
        return [
            self.name,
            self.operation,
            int(self.dtype),
            list(self.shape),
            self.op,
            self.root,
            None if self.group == before else self.group,
            self.priority,
            self.phase,
        ]

    def repeats(self, earlier: Request) -> bool:
        """Returns True if a plan that was made from `earlier` is also valid for this request."""
        return all(getattr(self, what) == getattr(earlier, what) for what in _AGREED)

    @staticmethod
    def decode(fields: list[Any], before: tuple[str, ...] = ()) -> Request:
        """Returns the request from the result of `encode` with the same `before`."""
        name, operation, dtype, shape, op, root, group, priority, phase = fields
        return Request(
            name=name,
            operation=operation,
            dtype=DType(dtype),
            shape=tuple(shape),
            op=op,
            root=root,
            group=before if group is None else tuple(group),
            priority=priority,
            phase=phase,
        )


def disagreement(requests: Mapping[int, Request]) -> str | None:
    """Returns the first difference between the requests of several ranks for one tensor.

    The text has each value, and the ranks that have it. None: the ranks agree.

    >>> a = Request(name="w", operation="all_reduce", dtype=DType.FLOAT32, shape=(2,))
    >>> b = Request(name="w", operation="all_reduce", dtype=DType.FLOAT32, shape=(3,))
    >>> disagreement({0: a, 1: b, 2: a})
    "tensor 'w': the ranks disagree about its shape: (2,) on ranks 0 and 2, (3,) on rank 1"
    >>> disagreement({0: a, 1: a}) is None
    True
    """
    for what in _AGREED:
        held: dict[Any, list[int]] = {}
        for rank in sorted(requests):
            held.setdefault(_compared(requests[rank], what), []).append(rank)
        if len(held) > 1:
            name = requests[min(requests)].name
            parts = (
                f"{_text(getattr(requests[ranks[0]], what))} on {ranks_text(ranks)}"
                for ranks in held.values()
            )
            return f"tensor {name!r}: the ranks disagree about its {what}: {', '.join(parts)}"
    return None


def _compared(request: Request, what: str) -> Any:
    if what == "shape" and request.operation == "all_gather":
        return ("any", *request.shape[1:]) if request.shape else ()  # first dimensions may differ
    return getattr(request, what)


def _text(value: Any) -> str:
    return value.name.lower() if isinstance(value, DType) else str(value)


def ranks_text(ranks: list[int] | tuple[int, ...]) -> str:
    """Returns the ranks in words.

    >>> ranks_text([3]), ranks_text([0, 1, 2])
    ('rank 3', 'ranks 0, 1 and 2')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
