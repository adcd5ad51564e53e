"""Loops that exchange messages between pairs of ranks. All libraries use the same loops.

For a message of 8 bytes, Python can take most of the time. All functions and arguments are
therefore local variables, and each call is made as the library's users would make it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from unisono.bench.cases import Case
from unisono.bench.expected_results import cut
from unisono.bench.peers.base import Array, Repeat

Transfer = Callable[[Any, int], object]
"""A function that sends a message to a rank, or receives a message from a rank."""
Begin = Callable[[Sequence[Any], int], Sequence[Any]]
"""A function that begins to send or receive several messages, and returns their handles."""
Finish = Callable[[Sequence[Any]], object]
"""A function that waits for all messages with these handles."""


def bind_messages(
    case: Case,
    rank: int,
    x: Array,
    out: Array,
    *,
    message: Callable[[Array], Any],
    send: Transfer,
    recv: Transfer,
    isend: Begin,
    irecv: Begin,
    finish: Finish,
) -> Repeat:
    """Returns a function that performs the case's operation between this rank and its partner a
    given number of times. `message` converts an array to the library's type."""
    outgoing = [message(part) for part in cut(x, case.sends(rank)[0])]
    incoming = [message(part) for part in cut(out, case.receives(rank)[0])]
    partner, leads = rank ^ 1, rank % 2 == 0
    if case.op == "ping_pong":
        loop = _ping if leads else _pong
        return partial(loop, send, recv, outgoing[0], incoming[0], partner)
    if leads:
        return partial(_stream, isend, finish, recv, outgoing, incoming[0], partner)
    return partial(_stream, irecv, finish, send, incoming, outgoing[0], partner)


def begin_each(
    begin: Callable[[Any, int], Any], messages: Sequence[Any], partner: int
) -> list[Any]:
    """Begins all messages with a function that begins one message. Returns the handles."""
    return [begin(message, partner) for message in messages]


def wait_each(works: Sequence[Any]) -> None:
    """Calls `wait` of all handles."""
    for work in works:
        work.wait()


def _ping(send: Transfer, recv: Transfer, x: Any, out: Any, partner: int, times: int) -> None:
    for _ in range(times):
        send(x, partner)
        recv(out, partner)


def _pong(send: Transfer, recv: Transfer, x: Any, out: Any, partner: int, times: int) -> None:
    for _ in range(times):
        recv(out, partner)
        send(x, partner)


def _stream(
    begin: Begin,
    finish: Finish,
    answer: Transfer,
    messages: Sequence[Any],
    reply: Any,
    partner: int,
    times: int,
) -> None:
    for _ in range(times):
        finish(begin(messages, partner))
        answer(reply, partner)
