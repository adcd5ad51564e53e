"""Tracing of calls: as spans of torch's profiler, and in the history of the flight recorder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from unisono.torch_backend.gloo_spans import gloo_name
from unisono.torch_backend.private import hide_from_dynamo, is_profiling, span

if TYPE_CHECKING:
    from collections.abc import Callable

    from unisono.torch_backend.history import History

# Positions of tensors among each call's positional arguments: (tensors read, tensors written).
_TENSORS = {
    "all_reduce": ((0,), (0,)),
    "reduce": ((0,), (0,)),
    "broadcast": ((0,), (0,)),
    "all_gather": ((0,), (1,)),
    "reduce_scatter": ((0,), (1,)),
    "all_to_all": ((0,), (1,)),
    "all_to_all_v": ((0,), (3,)),
    "gather": ((0,), (1,)),
    "scatter": ((0,), (1,)),
    "barrier": ((), ()),
    "send": ((0,), ()),
    "recv": ((), (0,)),
}
_NAMES = {"all_to_all_v": "all_to_all"}
"""Names in traces, for calls whose own names torch's tools do not know."""

CALLS = frozenset(_TENSORS)
"""The communicator's calls that can be recorded, traced, or issued with `async_op`."""

_PEER_AT = 1  # position of the peer among the arguments of send and recv


class TracedCommunicator:
    """Replaces the communicator while its calls are traced.

    Untraced calls go straight to the communicator, so they only check whether tracing must start.
    """

    def __init__(self, comm: Any, history: History | None, *, spans_of_gloo: bool = False) -> None:
        self.comm = comm
        self._history = history
        self._spans_of_gloo = spans_of_gloo
        self._is_inside = False

    def __getattr__(self, name: str) -> Any:
        target = getattr(self.comm, name)
        if name in CALLS:
            target = self._watching(name, target)
            setattr(self, name, target)  # later calls find it without __getattr__
        return target

    def as_one(self, name: str, read: list[torch.Tensor], issue: Callable[[], Any]) -> Any:
        """Returns `issue()`, which makes several calls. If the spans are those of Gloo, which makes
        one call of them, they have one span.
        """
        if not self._spans_of_gloo or self._is_inside or not is_profiling():
            return issue()
        self._is_inside = True
        try:
            with _span(gloo_name(name), read):
                return issue()
        finally:
            self._is_inside = False

    def _watching(self, method: str, target: Callable[..., Any]) -> Callable[..., Any]:
        name = _NAMES.get(method, method)

        def call(*args: Any, async_op: bool = False) -> Any:
            read, written = (_listed(args, where) for where in _TENSORS[method])
            if self._is_inside or not is_profiling():
                return self._recorded(name, target, args, read, written, async_op)
            if self._spans_of_gloo:
                named = _span(gloo_name(name, args), written if name == "recv" else read)
            else:
                named = _span(f"unisono:{name}", read or written)
            with named:
                return self._recorded(name, target, args, read, written, async_op)

        return call

    def _recorded(
        self,
        name: str,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        read: list[torch.Tensor],
        written: list[torch.Tensor],
        async_op: bool,
    ) -> Any:
        """Makes the call, and records it if there is a history."""
        if self._history is None:
            return target(*args, async_op=async_op)
        peer = args[_PEER_AT] if name in ("send", "recv") else None
        entry = self._history.begin(name, read, written, peer)
        result = target(*args, async_op=async_op)
        entry.end_with(result if async_op else None)
        return result


def _listed(args: tuple[Any, ...], where: tuple[int, ...]) -> list[torch.Tensor]:
    """Returns the tensors at these positions, including those in lists."""
    found: list[torch.Tensor] = []
    for position in where:
        value = args[position] if position < len(args) else None
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif value is not None:
            found.extend(value)
    return found


def _span(name: str, tensors: list[torch.Tensor]) -> Any:
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    details: dict[str, Any] = {"bytes": nbytes}
    if tensors:
        details["dtype"] = str(tensors[0].dtype).removeprefix("torch.")
    return span(name, tensors, details)


hide_from_dynamo(TracedCommunicator)
