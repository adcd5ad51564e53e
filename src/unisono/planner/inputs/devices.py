"""Devices: peak rates, memory and links, with the source of each number."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from unisono.planner.data_files import data_text
from unisono.planner.inputs.whole_numbers import switch, whole_number
from unisono.planner.positive_values import require_positive


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator or processor. Rates are one way and in bytes or FLOPs a second.

    Raises ValueError for rates and sizes that are not positive.
    """

    name: str
    architecture: str
    """Family of devices with the same efficiencies: volta, turing, ampere, ada, hopper, blackwell,
    cdna2, cdna3, davinci, gaudi, tpu, cpu. The devices of one host share a cpu."""
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
    """Usual number of devices of one NVLink domain, or of one host with PCIe."""
    pcie_switch: int = 0
    """Number of devices that share one PCIe link to the rest of their host: those of a switch. 1:
    each device has its own link. 0: the devices have other links, such as NVLink."""
    peer_access: bool = True
    """False if devices of a host copy through its memory (GeForce), at half of `link_Bps`."""
    clock: float = 1.0
    """Sustained clock rate, as a share of the clock rate of this architecture's full-power
    device."""
    watts: float | None = None
    """Largest power in watts. None: not known."""
    price_per_hour: float | None = None
    """Price of an hour, in any currency. None: not known; the catalogue has none."""
    source: str = "stated by the user"
    """Places of the numbers. In the catalogue by field, such as "memory_Bps, units: PLACE; ..."."""
    aliases: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "aliases", tuple(self.aliases))
        if not isinstance(self.peak, Mapping) or not self.peak:
            raise ValueError(f"{self.name}: peak needs the FLOP/s of at least one precision")
        object.__setattr__(self, "peak", dict(self.peak))
        for name in ("units", "per_host"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        object.__setattr__(
            self, "pcie_switch", whole_number("pcie_switch", self.pcie_switch, least=0)
        )
        object.__setattr__(self, "peer_access", switch("peer_access", self.peer_access))
        numbers = {
            name: getattr(self, name)
            for name in ("memory_bytes", "memory_Bps", "link_Bps", "network_Bps", "clock")
        }
        optional = {"watts": self.watts, "price_per_hour": self.price_per_hour}
        stated = {name: value for name, value in optional.items() if value is not None}
        numbers |= {**self.peak, **stated}
        require_positive({f"{self.name}: {name}": value for name, value in numbers.items()})

    def peak_of(self, precision: str) -> float:
        """Returns the FLOP/s of a precision. Raises ValueError if the device lacks it."""
        rate = self.peak.get(precision)
        if rate is None:
            near = next((each for each in _NEAR.get(precision, ()) if each in self.peak), None)
            raise ValueError(
                f"{self.name} has no {precision}; it has {', '.join(self.peak)}"
                + (f"; precision {near} works" if near else "")
            )
        return rate

    @property
    def peer_Bps(self) -> float:
        """Rate to another device of the same domain, one way."""
        return self.link_Bps if self.peer_access else self.link_Bps / 2

    def share(self, devices: int) -> Device:
        """Returns the part of a processor that one of several equal devices has.

        >>> device_named("a100").share(2).memory_Bps
        1019500000000.0
        """
        if devices == 1:
            return self
        return replace(
            self,
            peak={name: rate / devices for name, rate in self.peak.items()},
            memory_bytes=int(self.memory_bytes / devices),
            memory_Bps=self.memory_Bps / devices,
            link_Bps=self.link_Bps / devices,
            network_Bps=self.network_Bps / devices,
            units=max(self.units // devices, 1),
            watts=None if self.watts is None else self.watts / devices,
            price_per_hour=None if self.price_per_hour is None else self.price_per_hour / devices,
        )


_NEAR: Mapping[str, tuple[str, ...]] = {
    "bf16": ("fp16", "tf32", "fp32"),
    "fp16": ("bf16", "tf32", "fp32"),
    "tf32": ("fp32",),
    "fp8": ("bf16", "fp16", "fp32"),
    "fp4": ("fp8", "bf16", "fp16", "fp32"),
}
"""Precisions to use instead of one that a device lacks, nearest first."""


def device_named(name: str) -> Device:
    """Returns a device of the catalogue. Raises ValueError for unknown names.

    Names of `nvidia-smi` are accepted too. Case, blanks and the maker's name do not matter. "CPU"
    is this machine's processor; its rates are measured once, in a few tens of milliseconds.

    >>> device_named("a100").memory_Bps
    2039000000000.0
    >>> device_named("NVIDIA H100 80GB HBM3").name
    'H100-SXM5-80GB'
    >>> device_named("a1000")
    Traceback (most recent call last):
    ValueError: no device is named 'a1000'; near: A100-SXM4-80GB, RTX-A6000
    """
    if not isinstance(name, str):
        raise ValueError(f"a device's name is a text, not {name!r}")
    key = _key(name)
    if key == "cpu":
        from unisono.planner.inputs.this_machine import this_machine

        return this_machine()
    found = _by_name().get(key)
    if found is None:
        import difflib

        names = difflib.get_close_matches(key, _by_name(), cutoff=0.5)
        near = dict.fromkeys(_by_name()[each].name for each in names)
        known = near or dict.fromkeys(d.name for d in catalogue())
        raise ValueError(f"no device is named {name!r}; near: {', '.join(known)}")
    return found


def _key(name: str) -> str:
    """Returns a name without case, blanks and the makers' words, as `nvidia-smi` prints them.

    >>> _key(" Tesla V100-SXM2-32GB")
    'v100-sxm2-32gb'
    """
    joined = re.sub(r"[\s_-]+", "-", name.strip().lower())
    return re.sub(r"^((nvidia|tesla|geforce|amd|instinct|intel|google|huawei)-)+", "", joined)


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
    return {_key(name): d for d in catalogue() for name in (d.name, *d.aliases)}
