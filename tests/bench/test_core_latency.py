from __future__ import annotations

from unisono.bench.core_latency import describe_latency


def test_modes() -> None:
    assert describe_latency([45e-9, 47e-9, 52e-9]) == "47 near"
    assert describe_latency([190e-9, 210e-9]) == "200 far"
    assert describe_latency([45e-9, 200e-9, 210e-9]) == "200 mixed"
    assert describe_latency([]) == "-"
