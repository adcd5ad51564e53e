"""Tests that each fault of the lab has its documented effect on plain sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from lab.job import (
    TEMPORARY,
    Job,
    fill_disks,
    give_disks,
    listening,
    remains,
    stranger,
    wait_for_no_remains,
)
from lab.open_resources import open_resources
from lab.stranger import MANNERS
from ranks import Me
from time_limits import PATIENCE_S, limit_s
from unisono.bench.lab import Lab

pytestmark = pytest.mark.lab

LAYOUT = (1, 2)
SOCKET_TIMEOUT_S = 3.0
USER_TIMEOUT_MS = 2000


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=2) as made:
        give_disks(made)
        yield made


# ---- a job of plain sockets: each rank exchanges bytes with rank 0 and reports how this ended


def address_of(me: Me) -> tuple[str, int]:
    address, _, port = me.name.removeprefix("tcp://").rpartition(":")
    return address, int(port)


def echo_job(me: Me) -> None:
    """Rank 0 sends a byte to each rank every 50 ms, and each rank sends the byte back."""
    connections = _accept_all(me) if me.rank == 0 else [_connect(me)]
    me.say("joined", host=socket.gethostname(), **open_resources())
    me.attempt("ended", _echo, connections, me.rank == 0)


def _accept_all(me: Me) -> list[socket.socket]:
    with socket.create_server(address_of(me)) as listener:
        return [listener.accept()[0] for _ in range(me.size - 1)]


def _connect(me: Me) -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection(address_of(me), 10.0)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise TimeoutError("nobody listens")


def _echo(connections: list[socket.socket], first: bool) -> None:
    for connection in connections:
        connection.settimeout(SOCKET_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    while True:
        for connection in connections:
            if first:
                connection.sendall(b"x")
            if not connection.recv(1):
                raise EOFError("rank 0 sees the end" if first else "rank 1 or 2 sees the end")
            if not first:
                connection.sendall(b"x")
        time.sleep(0.05 if first else 0.0)


def test_ranks_are_on_their_hosts_and_a_killed_rank_is_detected_at_once(lab: Lab) -> None:
    with Job(lab, echo_job, LAYOUT) as job:
        joined = job.wait_for("joined", range(3))
        assert [said["host"] for said in joined] == ["host0", "host1", "host1"]
        assert all(said["descriptors"] >= 4 and said["threads"] >= 1 for said in joined)
        (outcome,) = job.outcomes("ended", [0], since=job.kill(2))
        assert outcome.error in ("EOFError", "ConnectionResetError")
        assert 0 <= outcome.after_s < limit_s(1)


def test_all_ranks_of_a_host_die_at_once(lab: Lab) -> None:
    with Job(lab, echo_job, LAYOUT) as job:
        job.wait_for("joined", range(3))
        assert job.ranks_on(1) == [1, 2]
        (outcome,) = job.outcomes("ended", job.others(job.ranks_on(1)), since=job.kill_host(1))
        assert outcome.error is not None
        assert outcome.after_s < limit_s(1)
        assert job.exit_codes()[1:] == [-9, -9]


@pytest.mark.parametrize("fault", [Job.power_off, Job.cut])
def test_silence_is_detected_by_the_socket_timeout_only(lab: Lab, fault: object) -> None:
    with Job(lab, echo_job, (1, 1)) as job:
        job.wait_for("joined", range(2))
        assert callable(fault)
        (outcome,) = job.outcomes("ended", [0], since=fault(job, 1))
        assert outcome.error == "TimeoutError"
        assert outcome.after_s > USER_TIMEOUT_MS / 1000 * 0.9


def test_a_short_cut_is_survived(lab: Lab) -> None:
    with Job(lab, echo_job, (1, 1)) as job:
        job.wait_for("joined", range(2))
        job.cut_for(0.3, 1)
        time.sleep(SOCKET_TIMEOUT_S)
        assert [p.poll() for p in job.processes] == [None] * 2
        assert all(said["event"] == "joined" for rank in range(2) for said in job.events[rank])


def test_a_stopped_rank_is_late_but_connected(lab: Lab) -> None:
    with Job(lab, echo_job, (1, 1)) as job:
        job.wait_for("joined", range(2))
        (outcome,) = job.outcomes("ended", [0], since=job.stop(1))
        assert outcome.error == "TimeoutError"
        assert (
            outcome.after_s > 0.9 * SOCKET_TIMEOUT_S
        )  # the socket's own timeout, since the kernel of the stopped rank acknowledged all data


# ---- limits


def opens_files(me: Me) -> None:
    """Opens files until that raises an error."""
    me.attempt("opened", _open_all)


def _open_all() -> None:
    kept = []
    for _ in range(1000):
        kept.append(os.open("/dev/null", os.O_RDONLY))


def writer(me: Me) -> None:
    me.attempt("wrote", _write)


def _write() -> None:
    with open(f"{TEMPORARY}/file", "wb") as file:
        file.write(bytes(65536))


def test_descriptors_run_out_for_one_rank(lab: Lab) -> None:
    with Job(lab, opens_files, (1, 1), descriptors={1: 64}) as job:
        free, limited = job.outcomes("opened", [0, 1], since=time.monotonic())
        assert free.error is None
        assert "Too many open files" in limited.text


def test_each_host_has_its_own_disks_which_can_be_full(lab: Lab) -> None:
    fill_disks(lab, 1)
    with Job(lab, writer, (1, 1)) as job:
        roomy, full = job.outcomes("wrote", [0, 1], since=time.monotonic())
        assert roomy.error is None
        assert "No space left" in full.text


# ---- objects that remain on hosts


LEAVES = """
import subprocess
subprocess.Popen(["sleep", "1000"], start_new_session=True)
open("/dev/shm/left", "w").close()
"""
LISTENS = "import socket, time; s = socket.create_server(('', 7)); time.sleep(1000)"


def test_remains_of_a_job_are_found(lab: Lab) -> None:
    assert wait_for_no_remains(lab, range(2)) == []
    with lab.start(1, [sys.executable, "-c", LEAVES]) as process:
        process.wait()
    with lab.start(0, [sys.executable, "-c", LISTENS]) as server:
        while not listening(lab, 0):
            time.sleep(0.01)
        assert listening(lab, 0) == [("0.0.0.0", 7)]
        left = remains(lab, 0)
        assert left.processes == (server.pid,)
        assert len(left.sockets) == 1
        server.kill()
    assert wait_for_no_remains(lab, [0]) == []
    left = remains(lab, 1)
    assert len(left.processes) == 1
    assert left.files == ("/dev/shm/left",)
    (found,) = wait_for_no_remains(lab, range(2), timeout_s=0.1)
    assert found == left


# ---- processes that are not ranks


@pytest.mark.parametrize("manner", [function.__name__ for function in MANNERS])
def test_a_stranger_connects_and_ends(lab: Lab, manner: str) -> None:
    server = (
        "import socket\n"
        "c = socket.create_server(('', 7)).accept()[0]\n"
        "try: c.sendall(b'hello'); print(len(c.recv(100)), flush=True)\n"
        "except ConnectionError: print('reset', flush=True)\n"
    )
    silent = manner == "hold"
    with lab.start(1, [sys.executable, "-c", server], stdout=subprocess.PIPE) as listener:
        while not listening(lab, 1):
            time.sleep(0.01)
        with stranger(lab, 0, manner, lab.address(1), 7) as program:
            assert listener.stdout is not None
            if silent:
                with pytest.raises(subprocess.TimeoutExpired):
                    listener.wait(0.3)
                listener.kill()
            else:
                assert listener.stdout.readline().strip() != b""
            listener.wait(PATIENCE_S)
            assert program.wait(PATIENCE_S) == 0
