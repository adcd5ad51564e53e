"""Exchange with the field: algorithm files of MSCCL and MSCCL++, both ways."""

from unisono.schedule.exchange.msccl import from_msccl_xml
from unisono.schedule.exchange.msccl_writer import to_msccl_xml
from unisono.schedule.exchange.mscclpp import from_mscclpp_json
from unisono.schedule.exchange.mscclpp_writer import to_mscclpp_json

__all__ = ["from_msccl_xml", "from_mscclpp_json", "to_msccl_xml", "to_mscclpp_json"]
