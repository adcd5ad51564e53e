"""This machine as a topology: read from sysfs (`sysfs`) and NVML (`gpus`), built in `machine`."""

from unisono.topology.discovery.gpus import nvlinks
from unisono.topology.discovery.machine import Device, Machine, discover
from unisono.topology.discovery.sysfs import survey

__all__ = ["Device", "Machine", "discover", "nvlinks", "survey"]
