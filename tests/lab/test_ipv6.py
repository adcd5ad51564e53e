"""Hosts with IPv6 addresses, with or without IPv4, and with or without TLS: the same calls and the
same failures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lab.bodies import busy
from lab.job import PORT, Job, give_disks, last_ranks, listening, wait_for_no_remains
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


def run_over_ipv6(lab: Lab, env: Mapping[str, str]) -> None:
    """Checks that all connections of a job use IPv6, and that cuts are detected as with IPv4."""
    rendezvous = f"tcp://[{address(0)}]:{PORT}"
    with Job(lab, busy, LAYOUT, env=env, rendezvous=rendezvous) as job:
        job.wait_for("joined", range(job.ranks))
        for host in range(2):
            assert {where for where, _ in listening(lab, host)} == {address(host)}
        lost = last_ranks(job)
        rest = job.others(lost)
        since = CUT.do(job)
        check(job.outcomes("ended", rest, since=since), lost, CUT)
        all_given_back(job, rest)
    assert wait_for_no_remains(lab, [0]) == []


def remove_ipv4_addresses(lab: Lab) -> None:
    for host in range(2):
        lab.run(host, ["ip", "address", "delete", f"{lab.address(host)}/24", "dev", "eth0"])


PSK = {"UNISONO_TLS": "psk", "UNISONO_JOB_SECRET": "what only the ranks of this test know"}


@pytest.mark.parametrize("env", [{}, PSK], ids=["clear", "psk"])
def test_hosts_with_ipv6_only(lab: Lab, env: Mapping[str, str]) -> None:
    remove_ipv4_addresses(lab)
    run_over_ipv6(lab, env)


@needs_openssl
def test_certificates_with_ipv6_only(lab: Lab, tmp_path: Path) -> None:
    remove_ipv4_addresses(lab)
    run_over_ipv6(lab, Authority(tmp_path / "ca").member("rank"))


def test_hosts_with_ipv4_and_ipv6(lab: Lab) -> None:
    run_over_ipv6(lab, {"UNISONO_SOCKET_FAMILY": "AF_INET6"})
