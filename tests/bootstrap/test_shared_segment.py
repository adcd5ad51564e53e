"""Ranks of one host find each other, and report ranks that are missing or invalid."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import unisono
from ranks import Me, Processes, Threads, no_descriptors, unique_name
from time_limits import PATIENCE_S
from unisono import RendezvousError
from unisono.bootstrap import shared_segment
from unisono.errors import AuthenticationError


def gather(*calls: Callable[[], Any]) -> list[Any]:
    """Runs the calls concurrently and returns the result or exception of each call."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(outcome, call) for call in calls]]


def join(name: str, rank: int, size: int, timeout_s: float = 20.0) -> Callable[[], Any]:
    return lambda: unisono.init(rank=rank, size=size, rendezvous=name, timeout_s=timeout_s)


def test_ranks_join_in_any_order_and_late() -> None:
    name = unique_name()

    def late() -> Any:
        time.sleep(0.3)
        return join(name, 0, 3)()

    comms = gather(join(name, 2, 3), late, join(name, 1, 3))
    assert sorted(comm.rank for comm in comms) == [0, 1, 2]
    sums = gather(*[lambda c=comm: c.all_reduce(np.ones(1)).tolist() for comm in comms])
    assert sums == [[3.0]] * 3
    for comm in comms:
        comm.close()


def test_a_name_can_be_used_again() -> None:
    name = unique_name()
    for _ in range(3):
        comms = gather(join(name, 0, 2), join(name, 1, 2))
        assert gather(*[comm.barrier for comm in comms]) == [None, None]


def test_child_programs_do_not_inherit_the_memory(
    threads: Callable[[int], Threads],
) -> None:
    held = threads(3)
    segments = [fd for fd, file in open_files().items() if file.startswith("/memfd:unisono")]
    assert len(segments) >= held.ranks
    assert [fd for fd in segments if os.get_inheritable(fd)] == []


def open_files() -> dict[int, str]:
    files = {}
    for fd in os.listdir("/proc/self/fd"):
        # the descriptor that lists the folder is closed again
        with contextlib.suppress(FileNotFoundError):
            files[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return files


def test_a_missing_rank_is_named_on_all_ranks() -> None:
    name = unique_name()
    outcomes = gather(join(name, 0, 5, 2), join(name, 2, 5), join(name, 4, 5))
    for outcome in outcomes:
        assert isinstance(outcome, RendezvousError), outcomes
        assert ": timeout after 2 s: these ranks of 5 are missing: [1, 3]" in str(outcome)


def test_a_missing_rank_0_is_named() -> None:
    (outcome,) = gather(join(unique_name(), 1, 2, 0.3))
    assert isinstance(outcome, RendezvousError)
    assert "rank 1 of 2: rank 0 did not listen at the rendezvous" in str(outcome)


def test_two_claims_to_one_rank_are_refused() -> None:
    name = unique_name()
    calls = [join(name, 0, 3), join(name, 1, 3), join(name, 1, 3)]
    outcomes = gather(*calls)
    assert all(isinstance(outcome, RendezvousError) for outcome in outcomes), outcomes
    assert all("two processes claim to be rank 1 of 3" in str(outcome) for outcome in outcomes)


def test_two_claims_to_rank_0_are_refused() -> None:
    name = unique_name()
    outcomes = gather(join(name, 0, 2, 0.5), join(name, 0, 2, 0.5))
    assert all(isinstance(outcome, RendezvousError) for outcome in outcomes), outcomes
    texts = " ".join(map(str, outcomes))
    assert "[1]" in texts
    assert "another rank 0 already listens" in texts or texts.count("[1]") == 2


def test_ranks_with_different_sizes_are_refused() -> None:
    name = unique_name()
    outcomes = gather(join(name, 0, 3), join(name, 1, 4))
    assert all(isinstance(outcome, RendezvousError) for outcome in outcomes), outcomes
    assert all("rank 1 expects 4 ranks, rank 0 expects 3" in str(outcome) for outcome in outcomes)


def test_a_rank_too_many_is_refused() -> None:
    name = unique_name()
    outcomes = gather(join(name, 0, 2, 2), join(name, 1, 2, 2), join(name, 1, 2, 2))
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert errors
    assert all(isinstance(error, RendezvousError) for error in errors), errors


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_rank_lost_while_the_group_forms_is_reported(cut: int) -> None:
    name = unique_name()

    def fragile() -> None:
        with stranger(name) as connection:
            connection.sendall(struct.pack("<8sII", b"unisono1", 1, 3))
            if cut > 0:
                connection.recv(64)
            if cut > 1:
                connection.sendall(b"R")

    outcomes = gather(join(name, 0, 3, 3), join(name, 2, 3, 3), fragile)
    assert all(isinstance(outcome, RendezvousError) for outcome in outcomes[:2]), outcomes


def address(name: str, user: int = os.getuid()) -> str:
    digest = hashlib.sha256(f"{user}\0{name}".encode()).hexdigest()
    return f"\0unisono-{digest[:40]}"


def stranger(name: str, user: int = os.getuid()) -> socket.socket:
    """Connects to the rendezvous from a process that is not a rank."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address(name, user))
        except OSError:
            connection.close()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return connection


def test_strangers_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    name = unique_name()
    gone = threading.Event()

    def strangers() -> None:
        hello = struct.Struct("<8sII")
        for data in (
            b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 16, b"\xff" * 4096,
            hello.pack(b"unisono2", 1, 2), hello.pack(b"unisono1", 1, 2)[:9],
        ):  # fmt: skip
            with stranger(name) as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    connection.recv(10)
        gone.set()

    def second() -> Any:
        assert gone.wait(30)
        return join(name, 1, 2)()

    first, other, _ = gather(join(name, 0, 2), second, strangers)
    assert gather(first.barrier, other.barrier) == [None, None]
    assert caplog.text.count("rejected a connection") == 6


def test_a_listener_that_is_not_a_rank_is_refused() -> None:
    name = unique_name()
    for answer in (b"", b"W" * 17, b"garbage", b"Rno such job"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address(name))
            listener.listen()

            def answering(answer: bytes = answer, listener: socket.socket = listener) -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(16)
                    connection.sendall(answer)

            outcome, _ = gather(join(name, 1, 2, 5), answering)
            assert isinstance(outcome, RendezvousError), outcome


def test_rank_size_and_rendezvous_must_come_together() -> None:
    with pytest.raises(ValueError, match="expected all three or none"):
        unisono.init(rank=0, size=1)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        unisono.init(rank=2, size=2, rendezvous="x")
    with pytest.raises(ValueError, match="rank 0 of 0"):
        unisono.init(rank=0, size=0, rendezvous="x")
    with pytest.raises(RendezvousError, match=r"torchrun, mpiexec, srun or mlx\.launch"):
        unisono.init()
    with pytest.raises(ValueError, match="more than 0 seconds"):
        unisono.init(rank=0, size=1, rendezvous="x", timeout_s=0)


def test_the_environment_gives_rank_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_RANK", "0")
    monkeypatch.setenv("UNISONO_SIZE", "1")
    monkeypatch.setenv("UNISONO_RENDEZVOUS", unique_name())
    monkeypatch.setenv("UNISONO_TIMEOUT_S", "7.5")
    with unisono.init() as comm:
        assert (comm.rank, comm.size, comm.timeout_s) == (0, 1, 7.5)
    with unisono.init(timeout_s=3) as comm:
        assert comm.timeout_s == 3


def test_a_rank_without_a_free_descriptor_reports_it() -> None:
    leader, follower = socket.socketpair()
    with leader, follower:
        socket.send_fds(leader, [b"welcome"], [follower.fileno()])
        with no_descriptors(), pytest.raises(RendezvousError, match="too many open files"):
            shared_segment._take_segment(follower, NotImplemented, NotImplemented)


NOBODY = 65534
needs_two_users = pytest.mark.skipif(
    os.getuid() != 0, reason="only root can start ranks of two users"
)


class ReportingHandler(logging.Handler):
    """A log handler that sends records to the test immediately."""

    def __init__(self, me: Me) -> None:
        super().__init__()
        self.me = me

    def emit(self, record: logging.LogRecord) -> None:
        self.me.say("logged", text=record.getMessage())


def of_two_users(me: Me, nobody: int) -> None:
    logging.getLogger("unisono").addHandler(ReportingHandler(me))
    if me.rank == nobody:
        os.setuid(NOBODY)
    with pytest.raises(RendezvousError) as caught:
        me.join(timeout_s=2.5)
    me.say("refused", text=str(caught.value))


def led_by_root(me: Me) -> None:
    of_two_users(me, nobody=1)


def followed_by_root(me: Me) -> None:
    of_two_users(me, nobody=0)


@needs_two_users
def test_ranks_of_different_users_are_refused_with_both_users() -> None:
    rule = "one user must run all ranks of a job"
    with Processes(led_by_root, 2) as some, Processes(followed_by_root, 2) as others:
        for ranks, leader, follower in ((some, 0, NOBODY), (others, NOBODY, 0)):
            one, other = (said["text"] for said in ranks.wait_for("refused", [0, 1]))
            tried = f"rank 0 of 2 runs as user {leader}, a process that tried to join as user "
            assert f"these ranks of 2 are missing: [1]; {tried}{follower}: {rule}" in one
            assert f"rank 1 of 2 runs as user {follower}, rank 0 as user {leader}: {rule}" in other
            first = ranks.events[0][0]
            # the warning is logged before rank 0's timeout expires
            assert first["event"] == "logged"
            assert f"rejected a connection: {tried}{follower}: {rule}" in first["text"]


def joining_after_another_user(me: Me) -> None:
    if me.rank == 1:
        os.seteuid(NOBODY)
        with stranger(me.name, 0) as connection:
            os.seteuid(0)
            assert connection.recv(1) == b""
    with me.join() as comm:
        comm.barrier()
    me.say("joined")


@needs_two_users
def test_a_process_of_another_user_cannot_end_a_job() -> None:
    with Processes(joining_after_another_user, 2) as ranks:
        ranks.wait_for("joined", [0, 1])


def beside_a_listener_of_another_user(me: Me) -> None:
    if me.rank == 0:
        os.setuid(NOBODY)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(address(me.name, 0))
            listener.listen()
            listener.accept()
    else:
        with pytest.raises(AuthenticationError) as caught:
            me.join()
        me.say("refused", text=str(caught.value))


@needs_two_users
def test_a_listener_of_another_user_is_reported_with_a_remedy() -> None:
    with Processes(beside_a_listener_of_another_user, 2, name="taken") as ranks:
        (said,) = ranks.wait_for("refused", [1])
    assert said["text"] == (
        "rank 1 of 2 runs as user 0, the listener as rank 0 as user 65534: one user must run all "
        "ranks of a job; if the listener is not a rank of this job, choose another rendezvous "
        "than 'taken'"
    )
