"""Readers and writers for algorithm files of MSCCL and MSCCL++."""

from unisono.schedule.formats.msccl import from_msccl_xml
from unisono.schedule.formats.msccl_writer import to_msccl_xml
from unisono.schedule.formats.mscclpp import from_mscclpp_json
from unisono.schedule.formats.mscclpp_writer import to_mscclpp_json

__all__ = ["from_msccl_xml", "from_mscclpp_json", "to_msccl_xml", "to_mscclpp_json"]
