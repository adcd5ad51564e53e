"""NVLinks of this machine, from NVIDIA's management library (NVML)."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

NvLinks: TypeAlias = Mapping[str, Mapping[str, int]]
"""Number of NVLinks from one PCI address to another, by GPU address and then peer address."""


def nvlinks() -> dict[str, dict[str, int]]:
    """Returns the active NVLinks of this machine's GPUs.

    The result is empty if the package `nvidia-ml-py` or the driver is missing.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return {}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {}
    try:
        gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return {address(nvml.nvmlDeviceGetPciInfo(gpu).busId): _links(nvml, gpu) for gpu in gpus}
    except nvml.NVMLError:
        return {}
    finally:
        nvml.nvmlShutdown()


def address(bus: str | bytes) -> str:
    """Returns a PCI address in the notation of sysfs.

    >>> address("00000000:3B:00.0")
    '0000:3b:00.0'
    """
    text = (bus.decode() if isinstance(bus, bytes) else bus).lower()
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _links(nvml: Any, gpu: Any) -> dict[str, int]:
    found = Counter[str]()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(gpu, link):
                found[address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId)] += 1
        except nvml.NVMLError:
            continue  # the GPU does not have this link
    return dict(found)
