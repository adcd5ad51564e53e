"""Measures the current latency between cores. The latency changes when a virtual machine migrates,
and affects all results."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from statistics import median

FAR_S = 100e-9
_SAMPLES = 2000


def probe_core_latency_s() -> float | None:
    """Returns the one-way latency of a cache line between two threads, or None if the C++ core is
    missing."""
    try:
        native = importlib.import_module("unisono.native")
    except ImportError:
        return None
    probe = getattr(native, "probe_core_latency", None)
    return None if probe is None else float(probe(_SAMPLES))


def describe_latency(probes_s: Sequence[float]) -> str:
    """Returns the median of the latencies measured for one row, in ns, and whether the cores are
    near or far from each other. Examples are `45 near`, `190 far`, `120 mixed`, and `-` if nothing
    was measured.

    >>> describe_latency([45e-9, 51e-9])
    '48 near'
    """
    if not probes_s:
        return "-"
    far = [probe_s >= FAR_S for probe_s in probes_s]
    mode = "far" if all(far) else "mixed" if any(far) else "near"
    return f"{median(probes_s) * 1e9:.0f} {mode}"
