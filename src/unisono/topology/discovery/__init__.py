"""The topology of this machine: `sysfs` and `gpus` (NVML) read facts, `machine` builds the
topology."""

from unisono.topology.discovery.gpus import nvlinks
from unisono.topology.discovery.machine import Device, Machine, discover
from unisono.topology.discovery.sysfs import survey

__all__ = ["Device", "Machine", "discover", "nvlinks", "survey"]
