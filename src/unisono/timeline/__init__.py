"""Timelines of ranks. Each rank records its last events; functions merge all timelines.

`TimelineWriter` (`timeline_writer.py`) records events in a file of fixed size. Any process can read
the file, even after the rank was killed (`timeline_file.py`, `timeline_folder.py`). A `RankDump`
has the contents of a file. Pure functions process dumps: `spans_of` finds intervals, `align_ranks`
translates all times to one clock (`clock_offset.py`), `merge_dumps` returns a trace for Perfetto,
and `summarize_steps` splits the time of each training step by cause.
"""

from typing import TYPE_CHECKING

from unisono.lazy_names import lazy_names
from unisono.timeline.clock_offset import (
    ClockAlignment,
    ClockReading,
    clock_identity,
    compare_clocks,
)
from unisono.timeline.event_kinds import (
    BACKWARD,
    CONTROLLER_THREAD,
    FORWARD,
    OPTIMIZER,
    EventKind,
)
from unisono.timeline.rank_dump import RankDump, load_contents, load_dumps, save_dumps
from unisono.timeline.shared_timeline import SharedTimeline
from unisono.timeline.timeline_folder import TimelineFile, files_of, files_of_jobs, find_files
from unisono.timeline.timeline_writer import Record, TimelineWriter

if TYPE_CHECKING:
    from unisono.timeline.aligned_ranks import AlignedRank, align_ranks, missing_ranks
    from unisono.timeline.merged_trace import merge_dumps
    from unisono.timeline.rank_spans import RankSpans, spans_of
    from unisono.timeline.step_summary import JobSummary, RankStep, StepSummary, summarize_steps
    from unisono.timeline.torch_ranges import TorchTrace

# Every rank imports this package to record its timeline. Few programs process timelines.
__getattr__ = lazy_names(
    __name__,
    {
        "unisono.timeline.aligned_ranks": ["AlignedRank", "align_ranks", "missing_ranks"],
        "unisono.timeline.merged_trace": ["merge_dumps"],
        "unisono.timeline.rank_spans": ["RankSpans", "spans_of"],
        "unisono.timeline.step_summary": [
            "JobSummary",
            "RankStep",
            "StepSummary",
            "summarize_steps",
        ],
        "unisono.timeline.torch_ranges": ["TorchTrace"],
    },
)

__all__ = [
    "BACKWARD",
    "CONTROLLER_THREAD",
    "FORWARD",
    "OPTIMIZER",
    "AlignedRank",
    "ClockAlignment",
    "ClockReading",
    "EventKind",
    "JobSummary",
    "RankDump",
    "RankSpans",
    "RankStep",
    "Record",
    "SharedTimeline",
    "StepSummary",
    "TimelineFile",
    "TimelineWriter",
    "TorchTrace",
    "align_ranks",
    "clock_identity",
    "compare_clocks",
    "files_of",
    "files_of_jobs",
    "find_files",
    "load_contents",
    "load_dumps",
    "merge_dumps",
    "missing_ranks",
    "save_dumps",
    "spans_of",
    "summarize_steps",
]
