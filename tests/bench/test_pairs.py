"""Tests of benchmarks of messages between pairs: the exchanged data, the detection of errors, the
loops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from unisono.bench.cases import STORAGE, Case
from unisono.bench.cluster import network_bytes
from unisono.bench.expected_results import allocate, count_wrong, cut
from unisono.bench.peers.pairs import begin_each, bind_messages, wait_each
from unisono.bench.results import Measurement, Row, RunReport

OPS = ("ping_pong", "stream")
SIZES = (8, 999, 300_000)


def test_a_call_of_a_stream_has_a_window_and_an_answer() -> None:
    case = Case(op="stream", ranks=4, nbytes=4000)
    assert (case.sends(2), case.receives(2)) == ((64, 1000), (1, 1))
    assert (case.sends(3), case.receives(3)) == ((1, 1), (64, 1000))
    assert case.messages == 64


def test_a_call_of_a_ping_pong_has_a_message_in_each_direction() -> None:
    case = Case(op="ping_pong", ranks=2, nbytes=4000)
    assert case.sends(0) == case.sends(1) == case.receives(0) == (1, 1000)
    assert case.messages == 2


def test_a_rank_without_a_partner_is_refused() -> None:
    with pytest.raises(ValueError, match="even number of ranks, got 3"):
        Case(op="stream", ranks=3, nbytes=8)


def test_each_pair_sends_one_message_between_hosts() -> None:
    def crossing(op: str, ranks: int, hosts: int) -> float:
        return network_bytes(Case(op=op, ranks=ranks, nbytes=1000), hosts)

    assert [crossing(op, ranks=2, hosts=2) for op in OPS] == [1000, 1000]
    assert (
        crossing("stream", ranks=4, hosts=2) == 0
    )  # ranks 0 and 1 are on the first host, 2 and 3 on the second
    assert crossing("stream", ranks=6, hosts=2) == 1000  # only ranks 2 and 3 are on different hosts


# ---- detection of wrong messages


Spoil = Callable[[Any, Any], None]
"""Changes the buffer that a rank received; also gets the buffer of the previous exchange."""


def exchanged(case: Case, spoil: Spoil = lambda out, before: None) -> int:
    """Returns the number of wrong elements on both ranks of a pair; `spoil` changes rank 1's
    buffer.
    """
    memory = [allocate(case, rank) for rank in (0, 1)]
    barrier = threading.Barrier(2)
    before = memory[1][1].copy()
    found = {}

    def call(rank: int) -> None:
        barrier.wait()
        memory[rank][1][:] = memory[1 - rank][0]
        if rank == 1:
            received = memory[1][1].copy()
            spoil(memory[1][1], before)
            before[:] = received
        barrier.wait()

    def verify(rank: int) -> None:
        found[rank] = count_wrong(case, rank, *memory[rank], partial(call, rank))

    threads = [threading.Thread(target=verify, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found[0] + found[1]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", STORAGE)
def test_right_messages_pass(op: str, dtype: str) -> None:
    assert exchanged(Case(op=op, ranks=2, nbytes=999, dtype=dtype)) == 0


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 63), (30, 31)])
def test_reordered_messages_are_found(nbytes: int, first: int, second: int) -> None:
    case = Case(op="stream", ranks=2, nbytes=nbytes)

    def swap(out: Any, before: Any) -> None:
        parts = cut(out, case.messages)
        parts[first][:], parts[second][:] = parts[second].copy(), parts[first].copy()

    # Both exchanges are wrong. A few elements may have the right value by chance.
    assert exchanged(case, swap) > 2 * 2 * case.count * 0.99 - 1


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("op", OPS)
def test_a_message_of_the_previous_exchange_is_found(op: str, nbytes: int) -> None:
    case = Case(op=op, ranks=2, nbytes=nbytes)

    def repeat(out: Any, before: Any) -> None:
        cut(out, case.outstanding)[-1][:] = cut(before, case.outstanding)[-1]

    assert exchanged(case, repeat) > 2 * case.count * 0.99 - 1


def test_a_lost_message_and_a_wrong_byte_are_found() -> None:
    case = Case(op="stream", ranks=2, nbytes=999)

    def lose(out: Any, before: Any) -> None:
        cut(out, case.messages)[7].view(np.uint8).fill(0xA5)

    def change(out: Any, before: Any) -> None:
        out.view(np.uint8)[1234] ^= 1

    assert exchanged(case, lose) == 2 * case.count
    assert exchanged(case, change) == 2


# ---- measurement loops


class QueueLibrary:
    """A simulated message library in which each direction is a queue."""

    def __init__(self) -> None:
        self.queues: tuple[SimpleQueue[Any], SimpleQueue[Any]] = (SimpleQueue(), SimpleQueue())
        self.most = 0
        self._begun = 0

    def send(self, x: Any, partner: int) -> None:
        self.queues[partner].put(x.copy())

    def recv(self, out: Any, partner: int) -> None:
        out[:] = self.queues[1 - partner].get(timeout=10)

    def isend(self, x: Any, partner: int) -> QueueLibrary.Handle:
        self._begun += 1
        self.most = max(self.most, self._begun)
        self.send(x, partner)
        return self.Handle(self)

    def irecv(self, out: Any, partner: int) -> QueueLibrary.Receipt:
        return self.Receipt(lambda: self.recv(out, partner))

    class Handle:
        def __init__(self, library: QueueLibrary) -> None:
            self._line = library

        def wait(self) -> None:
            self._line._begun -= 1

    class Receipt:
        def __init__(self, wait: Callable[[], None]) -> None:
            self.wait = wait


@pytest.mark.parametrize("op", OPS)
def test_the_loops_deliver_every_message(op: str) -> None:
    case, library = Case(op=op, ranks=2, nbytes=100), QueueLibrary()
    found = {}

    def run(rank: int) -> None:
        x, out = allocate(case, rank)
        repeat = bind_messages(
            case, rank, x, out, message=lambda part: part, send=library.send, recv=library.recv,
            isend=partial(begin_each, library.isend), irecv=partial(begin_each, library.irecv),
            finish=wait_each,
        )  # fmt: skip
        found[rank] = count_wrong(case, rank, x, out, partial(repeat, 3))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {0: 0, 1: 0}
    assert library.most == (64 if op == "stream" else 0)


# ---- figures derived from times


def test_times_are_per_message_and_rates_for_all_pairs(report: RunReport) -> None:
    case = Case(op="stream", ranks=8, nbytes=1 << 20)
    row = Row(case=case, measurements=(Measurement(contestant="unisono", times_s=(1e-3,)),))
    found = replace(report, rows=(row,)).to_dict()["rows"][0]["results"]["unisono"]
    assert found["algbw_Bps"] == pytest.approx((1 << 20) * 1e3)
    assert found["busbw_Bps"] == pytest.approx(4 * (1 << 20) * 1e3)
    assert found["messages_per_s"] == pytest.approx(4e3)
