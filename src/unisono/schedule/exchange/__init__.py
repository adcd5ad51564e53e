"""Exchange with the field: algorithm files of MSCCL and MSCCL++, both ways."""

from unisono.schedule.exchange.msccl import from_msccl_xml
from unisono.schedule.exchange.msccl_writer import to_msccl_xml

__all__ = ["from_msccl_xml", "to_msccl_xml"]
