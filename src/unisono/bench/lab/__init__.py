"""An emulated cluster on one machine. Hosts are network namespaces, which a virtual switch
connects.

Every host has its own addresses, host name and mounts. Each link can have a bandwidth limit and a
delay. Hosts share the machine's files and processors. `lab` creates them, `shaping` limits links,
and `host_process` keeps hosts alive and removes them.
"""

from unisono.bench.lab.lab import Lab, LabError, reason_unavailable
from unisono.bench.lab.shaping import EVEN, Shaping

__all__ = ["EVEN", "Lab", "LabError", "Shaping", "reason_unavailable"]
