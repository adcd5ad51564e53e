"""A cluster: devices, their hosts or NVLink domains, and the network."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.planner.inputs.devices import Device, device_from, device_named
from unisono.planner.positive_values import require_positive
from unisono.text_files import reading

if TYPE_CHECKING:
    from unisono.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal devices in domains of fast links, with a flat network between the domains.

    Raises ValueError for unknown devices and sizes that do not fit.

    >>> Cluster(device="A100-SXM4-80GB", devices=1024).hosts
    128
    >>> Cluster.parse("h100:64").per_host
    8
    """

    device: str | Device
    """Name in the catalogue, or your own device."""
    devices: int
    """Number of devices."""
    per_host: int | None = None
    """Number of devices of one NVLink domain. None: the device's usual number."""
    link_Bps: float | None = None
    """Rate inside a domain, one way, for each device. None: the rate of the device's type."""
    network_Bps: float | None = None
    """Rate between domains, one way, for each device. None: the rate of the device's type."""
    oversubscription: float = 1.0
    """Factor by which the network between domains is slower than `network_Bps`, because all devices
    use it at the same time."""
    topology: Topology | None = field(default=None, hash=False, repr=False)
    """Network of `unisono.topology` whose ranks are the devices. With a topology, exchanges of all
    groups are simulated together. None: a flat network, whose times are closed forms."""
    kind: Device = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        kind = device_named(self.device) if isinstance(self.device, str) else self.device
        object.__setattr__(self, "kind", kind)
        if self.devices < 1:
            raise ValueError(f"devices must be at least 1, not {self.devices}")
        if self.per_host is None:
            object.__setattr__(self, "per_host", min(kind.per_host, self.devices))
        if self.domain < 1:
            raise ValueError(f"per_host must be at least 1, not {self.per_host}")
        rates = {n: getattr(self, n) for n in ("link_Bps", "network_Bps", "oversubscription")}
        require_positive({name: rate for name, rate in rates.items() if rate is not None})
        if self.topology is not None and self.topology.num_ranks != self.devices:
            raise ValueError(
                f"the topology has {self.topology.num_ranks} ranks, but the cluster has "
                f"{self.devices} devices"
            )

    @property
    def domain(self) -> int:
        """Number of devices of one NVLink domain."""
        assert self.per_host is not None
        return self.per_host

    @property
    def hosts(self) -> int:
        """Number of domains."""
        return -(-self.devices // self.domain)

    @cached_property
    def domain_Bps(self) -> float:
        """Rate of a device inside its domain, one way."""
        return self.link_Bps or self.kind.link_Bps

    @cached_property
    def between_Bps(self) -> float:
        """Rate of a device to other domains, one way."""
        return (self.network_Bps or self.kind.network_Bps) / self.oversubscription

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Returns the cluster of a short text, `device:count` or `device:count:per_host`.

        Raises ValueError for other texts.
        """
        name, *counts = text.split(":")
        if not 1 <= len(counts) <= 2 or not all(count.isdigit() for count in counts):
            raise ValueError(
                f"a cluster is device:count or device:count:per_host, such as a100:1024, not "
                f"{text!r}"
            )
        per_host = int(counts[1]) if len(counts) == 2 else None
        return cls(device=name, devices=int(counts[0]), per_host=per_host)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Reads a cluster from a JSON file. Raises ValueError for other content.

        The file holds the fields of `Cluster`. `device` is a name, or an object with the fields of
        `Device`; `"like": NAME` takes the missing fields from the catalogue. `topology` is a spec,
        such as "torus:8x8", or a file of a network.
        """
        with reading(Path(path)) as text:
            return cls.from_document(json.loads(text))

    @classmethod
    def read(cls, text: str) -> Cluster:
        """Returns the cluster of a command-line text: a .json file's name or a text for `parse`."""
        return cls.load(text) if text.endswith(".json") else cls.parse(text)

    @classmethod
    def from_document(cls, document: Any) -> Cluster:
        """Returns the cluster of a JSON object. Raises ValueError for unknown fields."""
        known = {each.name for each in fields(cls) if each.init}
        if not isinstance(document, dict) or not {"device", "devices"} <= set(document):
            raise ValueError("a cluster is a JSON object with at least device and devices")
        unknown = sorted(set(document) - known)
        if unknown:
            raise ValueError(f"unknown fields {', '.join(unknown)}; known: {sorted(known)}")
        values = {**document, "device": device_from(document["device"])}
        if "topology" in values:
            from unisono.topology import load

            values["topology"] = load(values["topology"])
        return cls(**values)
