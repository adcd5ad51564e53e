"""The C++ core. Other modules import the core's names from this module only."""

from __future__ import annotations

from pathlib import Path

try:
    from unisono import _native
    from unisono._native import (
        ANY_SOURCE,
        ANY_TAG,
        Arrays,
        CarriedVote,
        FastPath,
        Group,
        Job,
        Messages,
        Pack,
        Plan,
        PlannedTensors,
        Prepared,
        RecordedRun,
        RecordedVotedJob,
        Request,
        RunRecorder,
        Simulation,
        SlotColumn,
        TimelineRing,
        TlsContext,
        TlsSession,
        VotedAllReduce,
        VotedWork,
        Window,
        WindowPart,
        c_group,
        copy_memory,
        create_segment,
        hash_memory,
        heap_offset,
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
        signal_bytes,
        simulator_messages,
        sum_parts,
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


def library_folder() -> str:
    """Returns the folder of the core's libraries."""
    return str(Path(_native.__file__).parent)


__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "Arrays",
    "CarriedVote",
    "FastPath",
    "Group",
    "Job",
    "Messages",
    "Pack",
    "Plan",
    "PlannedTensors",
    "Prepared",
    "RecordedRun",
    "RecordedVotedJob",
    "Request",
    "RunRecorder",
    "Simulation",
    "SlotColumn",
    "TimelineRing",
    "TlsContext",
    "TlsSession",
    "VotedAllReduce",
    "VotedWork",
    "Window",
    "WindowPart",
    "c_group",
    "copy_memory",
    "create_segment",
    "hash_memory",
    "heap_offset",
    "in_progress_thread",
    "isa",
    "last_level_cache_bytes",
    "library_folder",
    "load_openssl",
    "meshed_cores",
    "narrow",
    "probe_core_latency",
    "scale",
    "segment_shape",
    "settle_on_core",
    "share_memory",
    "signal_bytes",
    "simulator_messages",
    "sum_parts",
    "usable_cores",
    "wait_all",
    "wait_any",
    "widen",
]
