"""Processes that are not ranks are refused, and the job continues."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from lab.job import Job, give_disks, listening, stranger, wait_for_no_remains
from lab.stranger import MANNERS
from lab.switch import needs_hosts
from ranks import Me
from time_limits import PATIENCE_S
from unisono.bench.lab import Lab

pytestmark = [pytest.mark.lab, needs_hosts]

WORK_S = 3.0
SLOW = pytest.mark.slow
SECRET = {"UNISONO_JOB_SECRET": "between us"}


def working(me: Me) -> None:
    """Runs all_reduce for some seconds, while other processes connect."""
    with me.join(30.0) as comm:
        me.say("joined")
        going = np.ones(1, dtype=np.int32)
        deadline_s = time.monotonic() + WORK_S
        while going[0]:
            x = np.full(10_000, float(comm.rank))
            comm.all_reduce(x)
            assert (x == comm.size * (comm.size - 1) / 2).all()
            going[0] = time.monotonic() < deadline_s
            comm.all_reduce(going, "min")
    me.say("done")


def working_until_asked(me: Me) -> None:
    """Runs all_reduce until a signal to rank 0, while other processes connect."""
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
    with me.join(30.0) as comm:
        me.say("joined")
        going = np.ones(1, dtype=np.int32)
        while going[0]:
            x = np.full(10_000, float(comm.rank))
            comm.all_reduce(x)
            assert (x == comm.size * (comm.size - 1) / 2).all()
            going[0] = not asked
            comm.all_reduce(going, "min")
    me.say("done")


def joining(me: Me) -> None:
    me.attempt("joined", me.join, 8.0)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=3) as made:
        give_disks(made)
        yield made


ALL = [function.__name__ for function in MANNERS]


@pytest.mark.parametrize(
    "manners",
    [pytest.param(ALL, id="all"), *(pytest.param(3 * [one], marks=SLOW, id=one) for one in ALL)],
)
def test_strangers_at_every_port_are_refused(lab: Lab, manners: list[str]) -> None:
    """Connects from a host without ranks to each port on which the job listens."""
    with Job(lab, working_until_asked, (2, 2), env=SECRET) as job, ExitStack() as stack:
        job.wait_for("joined", range(4))
        endpoints = [(lab.address(h), port) for h in (0, 1) for _, port in listening(lab, h)]
        assert endpoints
        strangers = [
            stack.enter_context(stranger(lab, 2, manner, *endpoint, stdout=subprocess.PIPE))
            for endpoint in endpoints
            for manner in manners
        ]
        for program in strangers:
            assert program.stdout is not None
            assert program.stdout.readline() == b"connected\n"
        job.ask(0)
        job.wait_for("done", range(4))
        assert job.exit_codes() == [0] * 4
        assert [program.wait(PATIENCE_S) for program in strangers] == [0] * len(strangers)
    assert wait_for_no_remains(lab, range(3)) == []


def test_strangers_during_the_bootstrap_are_refused(lab: Lab) -> None:
    with Job(lab, working, (2, 2), env=SECRET) as job:
        deadline_s = time.monotonic() + 20
        while not (endpoints := listening(lab, 0)) and time.monotonic() < deadline_s:
            time.sleep(0.005)
        strangers = [stranger(lab, 2, manner, lab.address(0), endpoints[0][1]) for manner in ALL]
        assert job.exit_codes() == [0] * 4
        for program in strangers:
            program.kill()
            program.wait()


def test_a_port_scan_has_no_effect(lab: Lab) -> None:
    scan = (
        "import socket, sys\n"
        "for port in range(20000, 40000):\n"
        "    s = socket.socket(); s.settimeout(0.2); s.connect_ex((sys.argv[1], port)); s.close()\n"
    )
    with Job(lab, working, (2, 2), env={**SECRET, "UNISONO_PORTS": "30000-30100"}) as job:
        job.wait_for("joined", range(4))
        assert all(
            30000 <= port <= 30100
            for host in (0, 1)
            for _, port in listening(lab, host)
            if port != 29_500
        )
        words = ["python3", "-c", scan, lab.address(1)]
        with lab.start(2, words, stderr=subprocess.DEVNULL) as scanner:
            assert job.exit_codes() == [0] * 4
            scanner.kill()


def test_another_secret_does_not_join(lab: Lab) -> None:
    def secret(rank: int) -> dict[str, str]:
        return {"UNISONO_JOB_SECRET": "wrong" if rank == 1 else "right"}

    began = time.monotonic()
    with Job(lab, joining, (1, 1), env_of=secret) as job:
        outcomes = job.outcomes("joined", [0, 1], since=began)
    assert outcomes[1].error == "AuthenticationError"
    # rank 1 fails at once, while rank 0 waits for a rank with the right secret
    assert outcomes[1].after_s < outcomes[0].after_s
    assert outcomes[0].error == "RendezvousError"
    assert "does not know the job's secret" in outcomes[0].text
    assert "right" not in outcomes[1].text


def test_ranks_listen_on_chosen_interfaces_only(lab: Lab) -> None:
    """Tests that ranks listen on the chosen interfaces only, and never on all interfaces."""
    with Job(lab, working, (2, 2)) as job:
        job.wait_for("joined", range(4))
        for host in (0, 1):
            for address, _ in listening(lab, host):
                assert address == lab.address(host)
        assert job.exit_codes() == [0] * 4
