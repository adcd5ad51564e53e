from __future__ import annotations

from unisono.bench.machine_facts import busy_cores, describe_machine


def test_facts() -> None:
    machine = describe_machine()
    assert machine["cores"] >= 1
    assert machine["cpu"]
    assert "numpy" in machine["packages"]


def test_busy_cores_are_not_negative() -> None:
    assert busy_cores(0.02) >= 0.0
