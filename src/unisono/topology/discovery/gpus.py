"""NVLinks, as NVIDIA's management library tells them; none where it is not there."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

NvLinks: TypeAlias = Mapping[str, Mapping[str, int]]
"""GPU by PCI address, then the address of what its links go to: how many."""


def nvlinks() -> dict[str, dict[str, int]]:
    """The active NVLinks of this machine's GPUs. Needs the package `nvidia-ml-py` and a driver;
    without them the answer is empty."""
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
    """A PCI address as sysfs writes it.

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
            continue  # this GPU has no such link
    return dict(found)
