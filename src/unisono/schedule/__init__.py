"""Schedules: the definition of each collective, the transfers that perform a collective, and the
proof of a schedule.

A `Builder` makes a `Schedule`. `check` proves the schedule. `lower` makes an `ExecutionPlan` for
each rank. `formats` reads and writes the algorithm files of MSCCL and MSCCL++.
"""

from typing import TYPE_CHECKING

from unisono.lazy_names import lazy_names
from unisono.schedule.builder import Builder, Index
from unisono.schedule.check import check
from unisono.schedule.coarsen import coarsen
from unisono.schedule.collective import MAX_RANKS, Collective, Numbers
from unisono.schedule.dataflow import Dataflow, folds_in_rank_order, trace
from unisono.schedule.execution_plan import READER_BYTES, ExecutionPlan, Reader
from unisono.schedule.lower import RankPlan, lower, lower_rank
from unisono.schedule.record import (
    RECORD_BYTES,
    REF_BYTES,
    Code,
    Flag,
    Record,
    Records,
    Ref,
    Space,
)
from unisono.schedule.replay import check_plans, lead_of
from unisono.schedule.schedule import Schedule
from unisono.schedule.schedule_json import from_json, to_json
from unisono.schedule.transfer import Columns, Transfer, Transfers

if TYPE_CHECKING:
    from unisono.schedule.formats import (
        from_msccl_xml,
        from_mscclpp_json,
        to_msccl_xml,
        to_mscclpp_json,
    )

# Every rank imports this package when it joins its group, and few programs read files.
__getattr__ = lazy_names(
    __name__,
    {
        "unisono.schedule.formats": [
            "from_msccl_xml",
            "from_mscclpp_json",
            "to_msccl_xml",
            "to_mscclpp_json",
        ]
    },
)

__all__ = [
    "MAX_RANKS",
    "READER_BYTES",
    "RECORD_BYTES",
    "REF_BYTES",
    "Builder",
    "Code",
    "Collective",
    "Columns",
    "Dataflow",
    "ExecutionPlan",
    "Flag",
    "Index",
    "Numbers",
    "RankPlan",
    "Reader",
    "Record",
    "Records",
    "Ref",
    "Schedule",
    "Space",
    "Transfer",
    "Transfers",
    "check",
    "check_plans",
    "coarsen",
    "folds_in_rank_order",
    "from_json",
    "from_msccl_xml",
    "from_mscclpp_json",
    "lead_of",
    "lower",
    "lower_rank",
    "to_json",
    "to_msccl_xml",
    "to_mscclpp_json",
    "trace",
]
