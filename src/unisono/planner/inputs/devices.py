"""Devices: peak rates, memory and links, with the source of each number."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import numpy as np

from unisono.planner.data_files import data_text


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator or processor. Rates are one way and in bytes or FLOPs a second.

    Raises ValueError for rates and sizes that are not positive.
    """

    name: str
    architecture: str
    """Family of devices with the same efficiencies: volta, ampere, hopper, blackwell, cdna3,
    davinci, cpu."""
    peak: Mapping[str, float] = field(hash=False)
    """Dense FLOP/s of matrix products, by precision."""
    memory_bytes: int
    memory_Bps: float
    link_Bps: float
    """Rate to the devices of the same NVLink domain, all links together."""
    network_Bps: float
    """Rate to other domains."""
    units: int = 100
    """Number of multiprocessors. Each computes one tile of a matrix product at a time."""
    per_host: int = 8
    """Usual number of devices of one NVLink domain."""
    clock: float = 1.0
    """Sustained clock rate, as a share of the clock rate of this architecture's full-power
    device."""
    watts: float | None = None
    """Power in watts, from the data sheet. None: not known."""
    price_per_hour: float | None = None
    """Price of an hour, in any currency. None: not known; the catalogue has none."""
    source: str = "stated by the user"
    aliases: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "aliases", tuple(self.aliases))
        object.__setattr__(self, "peak", dict(self.peak))
        if not self.peak:
            raise ValueError(f"{self.name}: peak needs the FLOP/s of at least one precision")
        numbers = {
            name: getattr(self, name)
            for name in ("memory_bytes", "memory_Bps", "link_Bps", "network_Bps", "units")
        }
        optional = {"watts": self.watts, "price_per_hour": self.price_per_hour}
        stated = {name: value for name, value in optional.items() if value is not None}
        for name, value in {**numbers, **self.peak, **stated, "clock": self.clock}.items():
            if not value > 0:
                raise ValueError(f"{self.name}: {name} must be positive, not {value}")

    def peak_of(self, precision: str) -> float:
        """Returns the FLOP/s of a precision. Raises ValueError if the device lacks it.

        A device that has only one of bf16 and fp16 uses its rate for both.
        """
        twin = {"bf16": "fp16", "fp16": "bf16", "tf32": "fp32"}.get(precision, precision)
        rate = self.peak.get(precision, self.peak.get(twin))
        if rate is None:
            raise ValueError(f"{self.name} has no {precision}; it has {', '.join(self.peak)}")
        return rate


def device_named(name: str) -> Device:
    """Returns a device of the catalogue. Raises ValueError for unknown names.

    "CPU" is this machine's processor; its rates are measured once, in a few tens of milliseconds.

    >>> device_named("a100").memory_Bps
    2039000000000.0
    >>> device_named("a1000")
    Traceback (most recent call last):
    ValueError: no device is named 'a1000'; near: A100-SXM4-80GB, A100-SXM4-40GB
    """
    if name.lower() == "cpu":
        return _this_machine()
    found = _by_name().get(name.lower())
    if found is None:
        import difflib

        names = difflib.get_close_matches(name.lower(), _by_name(), cutoff=0.5)
        near = dict.fromkeys(_by_name()[each].name for each in names)
        known = near or dict.fromkeys(d.name for d in catalogue())
        raise ValueError(f"no device is named {name!r}; near: {', '.join(known)}")
    return found


@cache
def catalogue() -> tuple[Device, ...]:
    """Returns the devices that the package ships, with the source of their numbers.

    >>> any(device.name == "H100-SXM5-80GB" for device in catalogue())
    True
    """
    entries = json.loads(data_text("devices.json"))["devices"]
    return tuple(Device(**entry) for entry in entries)


def device_from(document: Any) -> Device:
    """Returns the device of a JSON object.

    The object has all fields of `Device`, or a catalogue name as `like` and the changed fields.
    Raises ValueError for unknown fields.

    >>> device_from({"like": "a100", "name": "A100 at 1.2 GHz", "clock": 0.85}).clock
    0.85
    """
    if isinstance(document, str):
        return device_named(document)
    if not isinstance(document, dict):
        raise ValueError(f"a device is a name or a JSON object, not {document!r}")
    known = {each.name for each in fields(Device)}
    given = {key: value for key, value in document.items() if key != "like"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"unknown fields of a device: {', '.join(unknown)}")
    if "like" in document:
        base = device_named(document["like"])
        given = {each: getattr(base, each) for each in known} | {"source": "stated"} | given
    try:
        return Device(**given)
    except TypeError as error:
        raise ValueError(f"a device needs more fields: {error}") from error


@cache
def _by_name() -> dict[str, Device]:
    return {name.lower(): d for d in catalogue() for name in (d.name, *d.aliases)}


@cache
def _this_machine() -> Device:
    """Measures this machine's processor: a matrix product and a copy, with NumPy's threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    a = np.ones((512, 512), np.float32)
    product_s = _shortest_s(lambda: a @ a)
    block = np.ones(1 << 22, np.float64)
    copy = np.empty_like(block)
    copy_s = _shortest_s(lambda: np.copyto(copy, block))
    memory_Bps = 2 * block.nbytes / copy_s
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(
        name="CPU",
        architecture="cpu",
        peak={"fp32": 2 * 512**3 / product_s},
        memory_bytes=pages,
        memory_Bps=memory_Bps,
        link_Bps=memory_Bps / 4,
        network_Bps=125e6,
        units=cores or 1,
        per_host=cores or 1,
        source="measured on this machine: a product of 512 x 512 matrices, a copy of 32 MiB",
    )


def _shortest_s(action: Any, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return min(times)
