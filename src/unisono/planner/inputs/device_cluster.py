"""A cluster: devices, their hosts or NVLink domains, and the network."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.planner.inputs.devices import Device, device_from, device_named
from unisono.planner.inputs.whole_numbers import whole_number
from unisono.planner.positive_values import require_positive
from unisono.text_files import reading

if TYPE_CHECKING:
    from unisono.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal devices in domains of fast links, with a flat network between the domains.

    The devices of one host share a processor (architecture "cpu"): each has an equal part of its
    cores, memory and links. Raises ValueError for unknown devices and sizes that do not fit.

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
    """Number of devices of one NVLink domain or machine. None: the device's usual number; for "CPU"
    all devices, since it names one machine."""
    link_Bps: float | None = None
    """Rate inside a domain, one way, for each device. None: the rate of the device's type, or half
    of it without peer access."""
    network_Bps: float | None = None
    """Rate between domains, one way, for each device. None: the rate of the device's type."""
    oversubscription: float = 1.0
    """Factor of 1 or more by which the network between domains is slower than `network_Bps`,
    because all devices use it at the same time."""
    topology: Topology | None = field(default=None, hash=False, repr=False)
    """Network of `unisono.topology` whose ranks are the devices; a text is read as a spec, such as
    "torus:8x8", or as a file. With a topology, exchanges of all groups are simulated together.
    None: a flat network, whose times are closed forms."""
    kind: Device = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", whole_number("devices", self.devices))
        device = self.stated_device
        if self.per_host is None:
            # The name "CPU" means this machine, so all devices are processes on it.
            one_machine = device.architecture == "cpu" and isinstance(self.device, str)
            usual = self.devices if one_machine else min(device.per_host, self.devices)
            object.__setattr__(self, "per_host", usual)
        object.__setattr__(self, "per_host", whole_number("per_host", self.per_host))
        shares = min(self.domain, self.devices) if device.architecture == "cpu" else 1
        object.__setattr__(self, "kind", device.share(shares))
        rates = {n: getattr(self, n) for n in ("link_Bps", "network_Bps", "oversubscription")}
        require_positive({name: rate for name, rate in rates.items() if rate is not None})
        if not 1 <= self.oversubscription < inf:
            raise ValueError(
                f"oversubscription must be 1 or more, not {self.oversubscription}; state a faster "
                "network as network_Bps"
            )
        self._check_topology()

    def _check_topology(self) -> None:
        network: object = self.topology
        if network is None:
            return
        from unisono.topology import Topology, load

        if isinstance(network, str | Path):
            network = load(str(network))
            object.__setattr__(self, "topology", network)
        if not isinstance(network, Topology):
            raise ValueError(
                f"topology must be a Topology or a text such as 'torus:4x4', not {network!r}"
            )
        if network.num_ranks != self.devices:
            raise ValueError(
                f"the topology has {network.num_ranks} ranks, but the cluster has "
                f"{self.devices} devices"
            )

    @property
    def stated_device(self) -> Device:
        """The device as stated: for a processor, the whole machine that its devices share."""
        if isinstance(self.device, str):
            return device_named(self.device)
        if not isinstance(self.device, Device):
            raise ValueError(f"device must be a name or a Device, not {self.device!r}")
        return self.device

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
        return self.link_Bps or self.kind.peer_Bps

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
        if not 1 <= len(counts) <= 2 or not all(count.isdecimal() for count in counts):
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
        return cls(**{**document, "device": device_from(document["device"])})
