"""Optimizer states in the memory of the host, which the host's processors update (ZeRO-Offload, Ren
et al., arXiv 2101.06840).

Once a step, the gradients go to the host, and the new weights come back. No published run with
current software was fitted, so the rates are those of data sheets and of the paper.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.planner.inputs.device_cluster import Cluster

_LINK_BPS = {
    "volta": 15.75e9,
    "turing": 15.75e9,
    "ampere": 31.5e9,
    "ada": 31.5e9,
    "cdna2": 31.5e9,
    "hopper": 63e9,
    "cdna3": 63e9,
    "blackwell": 63e9,
}
"""Rate of 16 lanes of PCI Express of generation 3, 4 or 5, one way."""
_CHIP_LINK_BPS = 450e9
"""Rate of NVLink-C2C to a Grace processor, one way (data sheets of GH200, GB200 and GB300)."""
_LINK_SHARE = 0.8
"""Share of this rate that copies reach (CUDA's bandwidthTest on A100: 25 of 31.5 GB/s)."""
_UPDATE_S = 0.26e-9
"""Seconds in which all processors of a host update a parameter (Adam with AVX-512: 10 billion
parameters in 2.6 s on a DGX-2, table 4 of the paper)."""
_MOVED_BYTES = 4
"""Bytes of a gradient and of a weight, in 16 bits each."""


class HostOffload(NamedTuple):
    """The link of a device to its host, and the number of devices that share the host."""

    link_Bps: float
    devices: int

    @classmethod
    def of(cls, cluster: Cluster) -> HostOffload:
        """Returns the offload of a cluster. Raises ValueError if the device's link is not known."""
        device = cluster.kind
        if device.name.startswith(("GH", "GB")):
            return cls(_CHIP_LINK_BPS, 1 if device.name.startswith("GH") else 2)
        rate = _LINK_BPS.get(device.architecture)
        if rate is None:
            raise ValueError(
                f"offload: the link of {device.name} to its host is not known; offload = False, or "
                f"a device with an architecture of {', '.join(_LINK_BPS)}, works"
            )
        return cls(rate, min(device.per_host, 8, cluster.devices))

    def seconds(self, parameters: float) -> float:
        """Returns the seconds in which a host updates the parameters of each of its devices.

        >>> round(HostOffload(31.5e9, 8).seconds(1e9), 2)
        2.24
        """
        copies_s = parameters * _MOVED_BYTES / (self.link_Bps * _LINK_SHARE)
        return copies_s + parameters * self.devices * _UPDATE_S
