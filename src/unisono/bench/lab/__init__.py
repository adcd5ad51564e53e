"""A cluster on one machine: hosts that are network namespaces, joined by a switch.

Every host has addresses, a host name and mounts of its own. Each of its links can be limited in
bandwidth and given a delay. Hosts share the machine's files and processors. `lab` makes them,
`shaping` says how links are limited, `holder` keeps hosts and clears them away.
"""

from unisono.bench.lab.lab import Lab, LabError, reason_unavailable
from unisono.bench.lab.shaping import EVEN, Shaping

__all__ = ["EVEN", "Lab", "LabError", "Shaping", "reason_unavailable"]
