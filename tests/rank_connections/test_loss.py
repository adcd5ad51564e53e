"""Ranks as processes that die, stop or fall silent: all other ranks name the lost ranks in time."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from connection_managers import wait_until
from control_process import RankProcess, join_all
from time_limits import PATIENCE_S, limit_s
from unisono.bench.lab import Lab
from unisono.rank_connections.group_endpoint import Fault

SURVIVED_S = 1.0


@contextlib.contextmanager
def ranks_here(size: int) -> Iterator[list[RankProcess]]:
    ranks = [
        RankProcess([str(rank), str(size), "127.0.0.1"], subprocess.Popen) for rank in range(size)
    ]
    try:
        join_all(ranks)
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_process_is_named_at_once(victim: int) -> None:
    with ranks_here(3) as ranks:
        killed_at = time.monotonic()
        ranks[victim].process.kill()
        for rank in ranks:
            if rank is not ranks[victim]:
                failed = rank.expect("failed")
                pid = ranks[victim].process.pid
                assert failed["text"] == f"rank {victim} (host 127.0.0.1, pid {pid}) is gone"
                assert failed["fault"] == Fault.PEER_LOST
                assert failed["at"] - killed_at < limit_s(1)


def test_a_process_that_closes_is_not_lost() -> None:
    with ranks_here(3) as ranks:
        ranks[1].send("quit")
        assert ranks[1].process.wait(PATIENCE_S) == 0
        for rank in (ranks[0], ranks[2]):
            assert rank.expect("left")["peer"] == 1
        ranks[0].send("quit")
        assert ranks[0].process.wait(PATIENCE_S) == 0
        wait_until(lambda: ranks[2].count("left") == 2)
        time.sleep(0.1)
        assert not ranks[2].count("failed")


def test_a_stopped_process_is_not_lost_but_late() -> None:
    with ranks_here(3) as ranks:
        ranks[1].process.send_signal(signal.SIGSTOP)
        for rank in (ranks[0], ranks[2]):
            rank.send("overdue")
        # longer than the silence after which a host is lost; but the stopped rank's kernel still
        # answers
        time.sleep(3.5)
        ranks[1].process.send_signal(signal.SIGCONT)
        ranks[1].send("overdue")
        for rank in ranks:
            while rank.count("recorded") < 2:
                rank.expect("recorded")
                time.sleep(0.01)
            assert not rank.count("failed")


# ---- on several hosts


@pytest.fixture
def lab() -> Iterator[Any]:
    """Yields a lab of three hosts."""
    with Lab(hosts=3) as made:
        yield made


@contextlib.contextmanager
def ranks_on(lab: Any) -> Iterator[list[RankProcess]]:
    def start(host: int, words: list[str], **options: Any) -> subprocess.Popen[str]:
        started: subprocess.Popen[str] = lab.start(host, words, **options)
        return started

    ranks = []
    try:
        for host in range(3):
            words = [str(host), "3", lab.address(host)]
            ranks.append(RankProcess(words, lambda w, host=host, **o: start(host, w, **o)))
        join_all(ranks)
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


@pytest.mark.slow
@pytest.mark.parametrize("carrier", [True, False])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.lab
def test_a_cut_link_is_named_in_three_seconds(lab: Any, victim: int, carrier: bool) -> None:
    with ranks_on(lab) as ranks:
        for rank in ranks:
            rank.send("overdue")
        time.sleep(0.7)
        cut_at = time.monotonic()
        lab.cut(victim, carrier=carrier)
        for number, rank in enumerate(ranks):
            failed = rank.expect("failed", 5)
            # A rank that is cut off from the network detects only that rank 0 is silent.
            named = 0 if number == victim else victim
            if victim != 0 or number != 0:
                assert f"rank {named} (host 10.77.0.{named + 1}" in failed["text"]
            assert "has been silent" in failed["text"]
            assert failed["at"] - cut_at < 3, (number, failed["at"] - cut_at)


@pytest.mark.slow
@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.lab
def test_a_cut_link_is_named_after_rank_0_has_left(lab: Any, connected: bool) -> None:
    """Cuts the link of rank 2 after rank 0 has left. Ranks 1 and 2 must name each other, whether or
    not they have already connected to query each other's most recent calls.
    """
    with ranks_on(lab) as ranks:
        ranks[0].send("quit")
        assert ranks[0].process.wait(5) == 0
        for rank in ranks[1:]:
            rank.expect("left")
            if connected:
                rank.send("overdue")
                rank.expect("recorded")
        cut_at = time.monotonic()
        lab.cut(2)
        for rank in ranks[1:]:
            rank.send("overdue")
        for number, rank in enumerate(ranks[1:], 1):
            failed = rank.expect("failed", 8)
            assert failed["fault"] == Fault.PEER_LOST
            assert f"rank {3 - number}" in failed["text"]
            assert f"10.77.0.{4 - number}" in failed["text"]
            assert failed["at"] - cut_at < 4
            assert rank.count("left") == 1


@pytest.mark.slow
@pytest.mark.parametrize("carrier", [True, False])
@pytest.mark.parametrize("waiting", [True, False])
@pytest.mark.lab
def test_a_short_cut_is_survived(lab: Any, waiting: bool, carrier: bool) -> None:
    with ranks_on(lab) as ranks:
        if waiting:
            for rank in ranks:
                rank.send("overdue")
        for _ in range(2):
            time.sleep(1.2)
            lab.cut_for(SURVIVED_S, 1, carrier=carrier)
        time.sleep(1.5)
        assert not any(rank.count("failed") for rank in ranks)
        for rank in ranks:  # the ranks still exchange messages
            rank.send("overdue")
        for rank in ranks:
            rank.expect("recorded")


@pytest.mark.slow
@pytest.mark.lab
def test_a_link_cut_while_no_rank_waits_is_named(lab: Any) -> None:
    with ranks_on(lab) as ranks:
        cut_at = time.monotonic()
        lab.cut(2)
        for rank in ranks:
            failed = rank.expect("failed", 10)
            assert 2.5 < failed["at"] - cut_at < 7


@pytest.mark.slow
@pytest.mark.lab
def test_a_peer_on_an_unreachable_host_is_named(lab: Any) -> None:
    with ranks_on(lab) as ranks:
        lab.cut(1)
        begun = time.monotonic()
        ranks[2].send("reach")
        failed = ranks[2].expect("failed", 6)
        assert failed["at"] - begun < 4
        assert "rank 1" in failed["text"] and "10.77.0.2" in failed["text"]


@pytest.mark.slow
@pytest.mark.lab
def test_bulk_data_survives_a_short_cut_and_not_a_long_one(lab: Any) -> None:
    with ranks_on(lab) as ranks:
        for rank in ranks:
            rank.send("reach")
        for rank in ranks:
            rank.expect("attached")
        wait_until(lambda: all(rank.count("attached") == 2 for rank in ranks))
        for rank in ranks:
            rank.send("pump")
        time.sleep(0.5)
        lab.cut_for(SURVIVED_S, 1)
        time.sleep(1.5)
        for rank in ranks:
            assert not rank.count("broken")
            rank.send("flowing")
            assert rank.expect("flowing")["still"]
        cut_at = time.monotonic()
        lab.cut(1)
        for rank in ranks:
            assert rank.expect("broken", 4)["at"] - cut_at < 3
