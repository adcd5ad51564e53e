"""The C++ core. Other modules import its names from here only."""

from __future__ import annotations

try:
    from unisono._native import (
        ANY_SOURCE,
        ANY_TAG,
        Arrays,
        FastPath,
        Group,
        Job,
        Messages,
        Pack,
        Plan,
        Prepared,
        Request,
        Simulation,
        TlsContext,
        TlsSession,
        create_segment,
        in_progress_thread,
        isa,
        last_level_cache_bytes,
        load_openssl,
        meshed_cores,
        narrow,
        probe_core_latency,
        scale,
        segment_shape,
        settle_on_core,
        share_memory,
        simulator_messages,
        usable_cores,
        wait_all,
        wait_any,
        widen,
    )
except ImportError as error:
    raise ImportError(
        "the C++ core of unisono is not built for this Python: "
        "install with `pip install .`, or run `make` in a checkout"
    ) from error

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "Arrays",
    "FastPath",
    "Group",
    "Job",
    "Messages",
    "Pack",
    "Plan",
    "Prepared",
    "Request",
    "Simulation",
    "TlsContext",
    "TlsSession",
    "create_segment",
    "in_progress_thread",
    "isa",
    "last_level_cache_bytes",
    "load_openssl",
    "meshed_cores",
    "narrow",
    "probe_core_latency",
    "scale",
    "segment_shape",
    "settle_on_core",
    "share_memory",
    "simulator_messages",
    "usable_cores",
    "wait_all",
    "wait_any",
    "widen",
]
