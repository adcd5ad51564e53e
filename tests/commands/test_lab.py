from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.lab


def unisono_lab(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", "lab", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


def test_a_command_runs_on_every_host_and_ends_the_lab() -> None:
    script = "echo $(hostname) {I}; sleep 1000 & exit {I}"
    done = unisono_lab("--hosts", "3", "--", "sh", "-c", script)
    assert sorted(done.stdout.splitlines()) == [f"[host{i}] host{i} {i}" for i in range(3)]
    assert done.returncode == 1


def test_lab_prints_its_hosts_as_json() -> None:
    done = unisono_lab("--rails", "2", "--json", "-", "--", "true")
    hosts = json.loads(done.stdout)["hosts"]
    assert [host["name"] for host in hosts] == ["host0", "host1"]
    assert hosts[1]["addresses"] == ["10.77.0.2", "10.77.1.2"]
    assert hosts[0]["enter"][0] == "nsenter"
    assert done.returncode == 0
