"""The parameter server: servers hold the parameters and the optimizer, workers push gradients.

`ParameterServer` is the public class. Two files do not communicate: `byte_ranges.py` cuts the
parameters into shards and ranges, and `range_state.py` decides when a range's gradients are applied
and its values are sent. `server_plan.py` assigns shards to servers. `server_loop.py` runs a server,
`worker_exchange.py` runs the exchanges of a worker, and `server_group.py` continues after a loss.
"""

from unisono.parallel.parameter_server.member_state import LostUpdates
from unisono.parallel.parameter_server.parameter_server import (
    ParameterServer,
    ParameterServerStats,
)
from unisono.parallel.parameter_server.server_plan import RankTraffic, ServerPlan

__all__ = [
    "LostUpdates",
    "ParameterServer",
    "ParameterServerStats",
    "RankTraffic",
    "ServerPlan",
]
