"""Control messages among ranks of several hosts: failures, departures, and each rank's most recent
call.

Each rank has a `ConnectionManager`. It joins the world, opens the connections of each group, and
keeps the control channels. Every rank has a control channel to the control server on rank 0, which
forwards messages. If MPI connects the hosts, `MpiWatch` sends the control messages instead. `Vote`
is one host's vote on the group that replaces a failed one; `recovery` requests it.
"""

from unisono.rank_connections.connection_manager import ConnectionManager
from unisono.rank_connections.group_endpoint import Fault, PeerInfo
from unisono.rank_connections.mpi_watch import MpiWatch
from unisono.rank_connections.paxos_acceptor import (
    END_OF_BALLOTS,
    Vote,
    VotePhase,
    VoteReply,
    VoteRequest,
    cast_in,
)
from unisono.rank_connections.peer_messages import GaveUp, RecoveryText, Unreachable, VoteArrived

__all__ = [
    "END_OF_BALLOTS",
    "ConnectionManager",
    "Fault",
    "GaveUp",
    "MpiWatch",
    "PeerInfo",
    "RecoveryText",
    "Unreachable",
    "Vote",
    "VoteArrived",
    "VotePhase",
    "VoteReply",
    "VoteRequest",
    "cast_in",
]
