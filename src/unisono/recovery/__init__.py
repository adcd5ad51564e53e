"""Recovery: the ranks left after a failure agree on a new group and form it.

Each remaining rank runs `recover`. `membership_agreement` is the protocol as a pure function,
`quorum` counts the votes of hosts, and a `RecoveryTransport` sends the messages, on one host or
across hosts.
"""

from unisono.recovery.recovery import RecoveredGroup, recover
from unisono.recovery.transport import RecoveryRequest

__all__ = ["RecoveredGroup", "RecoveryRequest", "recover"]
