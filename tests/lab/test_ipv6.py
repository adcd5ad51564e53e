"""Hosts that have IPv6 addresses, alone or beside others, in clear text and under TLS: the same
calls, the same failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lab.bodies import busy
from lab.job import PORT, Job, await_no_remains, give_disks, last_ranks, listening
from lab.switch import needs_hosts
from lab.test_faults import FAULTS, all_given_back, check
from tls import Authority, needs_openssl
from unisono.bench.lab import Lab

pytestmark = [pytest.mark.lab, needs_hosts]

LAYOUT = (2, 1)
CUT = next(fault for fault in FAULTS if fault.name == "cut")


def address(host: int) -> str:
    return f"fd00:77::{host + 1}"


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=2) as made:
        give_disks(made)
        for host in range(2):
            words = ["ip", "address", "add", f"{address(host)}/64", "dev", "eth0", "nodad"]
            made.run(host, words)
        yield made


def suffer(lab: Lab, env: Mapping[str, str]) -> None:
    """All is said over IPv6; a cut is noticed as elsewhere."""
    meeting = f"tcp://[{address(0)}]:{PORT}"
    with Job(lab, busy, LAYOUT, env=env, meeting=meeting) as job:
        job.wait_for("joined", range(job.ranks))
        for host in range(2):
            assert {where for where, _ in listening(lab, host)} == {address(host)}
        lost = last_ranks(job)
        rest = job.others(lost)
        since = CUT.do(job)
        check(job.outcomes("ended", rest, since=since), lost, CUT)
        all_given_back(job, rest)
    assert await_no_remains(lab, [0]) == []


def leave_no_other_address(lab: Lab) -> None:
    for host in range(2):
        lab.run(host, ["ip", "address", "delete", f"{lab.address(host)}/24", "dev", "eth0"])


PSK = {"UNISONO_TLS": "psk", "UNISONO_JOB_SECRET": "what only the ranks of this test know"}


@pytest.mark.parametrize("env", [{}, PSK], ids=["clear", "psk"])
def test_hosts_with_no_other_address(lab: Lab, env: Mapping[str, str]) -> None:
    leave_no_other_address(lab)
    suffer(lab, env)


@needs_openssl
def test_certificates_and_no_other_address(lab: Lab, tmp_path: Path) -> None:
    leave_no_other_address(lab)
    suffer(lab, Authority(tmp_path / "ca").member("rank"))


def test_hosts_with_both_kinds(lab: Lab) -> None:
    suffer(lab, {"UNISONO_SOCKET_FAMILY": "AF_INET6"})
