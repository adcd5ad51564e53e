"""Recovery: the ranks that are left after a failure agree on who they are and form a new group.

`recover` runs on each of them. `agreement` is the protocol as a pure function, `quorum` counts
hosts' votes, and a `RecoveryTransport` carries the messages, on one host or across hosts.
"""

from unisono.recovery.recovery import recover
from unisono.recovery.transport import RecoveryRequest

__all__ = ["RecoveryRequest", "recover"]
