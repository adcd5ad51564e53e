"""Tests of real lab hosts: their properties, their faults and their removal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from time_limits import PATIENCE_S
from unisono.bench.lab import EVEN, Lab, LabError
from unisono.bench.lab import lab as lab_module

pytestmark = pytest.mark.lab

LISTEN = "import socket\nlistener = socket.create_server(('', 5000))\nwhile True: listener.accept()"
CONNECT = """
import socket, sys
socket.create_connection((sys.argv[1], 5000), float(sys.argv[2])).close()
"""
OWNER = """
import signal, sys, time
from unisono.bench.lab import Lab
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run under nohup
lab = Lab(hosts=2)
lab.up()
lab.start(1, ["sleep", "1000"])
while not lab.processes(1):  # it is on its way there
    time.sleep(0.01)
print(*lab.processes(1), flush=True)
time.sleep(1000)
"""


def wait_until(holds: Callable[[], object]) -> bool:
    """Waits until `holds()` is true once. Returns False if it never is."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (held := holds()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return bool(held)


def connect(lab: Lab, timeout_s: float) -> None:
    """Connects host 0 to host 1. Raises LabError if that fails."""
    lab.run(0, [sys.executable, "-c", CONNECT, lab.address(1), str(timeout_s)])


@pytest.fixture
def pair() -> Iterator[Lab]:
    """A lab of two hosts, of which host 1 listens."""
    with Lab(hosts=2) as lab, lab.start(1, [sys.executable, "-c", LISTEN]) as server:
        assert wait_until(lambda: lab.run(1, ["ss", "-Hltn", "sport = :5000"]))
        yield lab
        server.kill()


def test_a_host_has_its_own_name_addresses_and_network() -> None:
    with Lab(hosts=3, rails=2, subnet="10.9") as lab:
        assert lab.run(2, ["hostname"]) == "host2\n"
        assert lab.run(2, ["ls", "/sys/class/net"]).split() == ["eth0", "eth1", "lo"]
        assert "10.9.1.3/24" in lab.run(2, ["ip", "-br", "addr", "show", "eth1"])
        assert lab.run(0, ["getent", "hosts", "host2"]).split() == ["10.9.0.3", "host2"]
        assert lab.run(1, ["pwd"]) == f"{Path.cwd()}\n"


def test_labs_are_isolated_from_each_other(pair: Lab) -> None:
    connect(pair, PATIENCE_S)
    with Lab(hosts=2) as other, pytest.raises(LabError, match="refused"):
        connect(other, PATIENCE_S)


def test_a_cut_link_loses_packets_until_it_is_restored(pair: Lab) -> None:
    pair.cut(1)
    with pytest.raises(LabError, match="timed out"):
        connect(pair, 0.3)
    assert "LOWER_UP" in pair.run(1, ["ip", "link", "show", "eth0"])
    pair.mend(1)
    connect(pair, PATIENCE_S)


def test_a_pulled_cable_takes_the_interface_down(pair: Lab) -> None:
    pair.cut(1, carrier=False)
    assert "NO-CARRIER" in pair.run(1, ["ip", "link", "show", "eth0"])
    pair.mend(1)
    connect(pair, PATIENCE_S)


def test_kill_ends_all_processes_of_a_host_but_not_the_host(pair: Lab) -> None:
    assert len(pair.processes(1)) == 1
    pair.kill(1)
    assert pair.processes(1) == []
    with pytest.raises(LabError, match="refused"):
        connect(pair, PATIENCE_S)


def test_a_host_without_power_does_not_answer(pair: Lab) -> None:
    pair.power_off(1)
    assert pair.processes(1) == []
    with pytest.raises(LabError, match="timed out"):
        connect(pair, 0.3)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_lab_is_removed_after_any_end_of_its_owner(end: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        try:
            sleeper = int(owner.stdout.readline())
            network = os.readlink(f"/proc/{sleeper}/ns/net")
            owner.send_signal(end)
            owner.wait()
        finally:
            owner.kill()
        assert wait_until(lambda: network not in networks())


def networks() -> set[str]:
    """Returns the networks of all processes on this machine."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                found.add(os.readlink(process / "ns/net"))
            except OSError:
                continue
    return found


def test_an_agent_replaces_ssh(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    with Lab(hosts=2) as lab:
        lab.write_agent(agent)
        for words in (["10.77.0.2", "hostname"], ["-x", "host1", "hostname; true"]):
            answer = subprocess.run([agent, *words], capture_output=True, text=True, check=True)
            assert answer.stdout == "host1\n"
        unknown = subprocess.run([agent, "elsewhere", "true"], capture_output=True, check=False)
        assert b"no host elsewhere" in unknown.stderr


def test_missing_requirements_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LabError, match="apt install iproute2"):
        Lab(hosts=2).up()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in str(lab_module.reason_unavailable())


@pytest.mark.parametrize("rate", ["fast", "-5mbit", "0mbit", "", "1"])
def test_an_invalid_rate_is_refused(rate: str) -> None:
    with pytest.raises(LabError, match=f"such as 1gbit or 200mbit, got '{rate}'"):
        Lab(hosts=2, rate=rate)
    with pytest.raises(LabError, match="expected a rate"):
        Lab(hosts=2, rates={1: rate})


def test_an_error_of_tc_is_reported_and_the_lab_removed() -> None:
    made: set[str] = set()

    class WatchedLab(Lab):
        def down(self) -> None:
            pids = [process.pid for process in self._host_processes.values()]
            made.update(os.readlink(f"/proc/{pid}/ns/net") for pid in pids)
            super().down()

    with pytest.raises(LabError, match="latency"), WatchedLab(hosts=2, delay="soon"):
        pass
    assert len(made) == 3  # of both hosts and of the switch
    assert wait_until(lambda: not made & networks())


def test_even_ports_have_a_queue_for_each_host() -> None:
    """Tests the settings: every port has a queue for each other host, bursts are small, and the
    congestion control does not probe for bandwidth.
    """
    with Lab(hosts=3, rate="100mbit", rates={2: "50mbit"}, shaping=EVEN) as lab:
        control = "/proc/sys/net/ipv4/tcp_congestion_control"
        for host in range(3):
            assert lab.run(host, ["cat", control]) == "reno\n"
            assert "initcwnd 90" in lab.run(host, ["ip", "route", "show", "dev", "eth0"])
            assert "gso_max_size 16384" in lab.run(host, ["ip", "-d", "link", "show", "eth0"])
            for place, port in ((host, "eth0"), ("switch", f"h{host}r0")):
                classes = lab.run(place, ["tc", "class", "show", "dev", port])
                # traffic classes: one for each other host, and the default class
                assert classes.count("parent 1:1 ") == 3
                assert f"ceil {'50' if host == 2 else '100'}Mbit" in classes
                assert lab.run(place, ["tc", "filter", "show", "dev", port]).count("match") == 2
    with pytest.raises(ValueError, match="cannot have delays"):
        Lab(hosts=2, shaping=EVEN, delay="1ms")
