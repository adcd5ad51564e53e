"""The parameter server: servers hold the parameters and the optimizer, workers push gradients.

`ParameterServer` is the public class. Two files are pure: `byte_ranges.py` cuts the parameters into
shards and ranges, and `range_state.py` decides when a range's gradients are applied and read.
`server_plan.py` says who serves what. `server_loop.py` is a server, `worker_exchange.py` a worker,
and `server_group.py` goes on after a loss.
"""

from unisono.parallel.parameter_server.member_standing import LostUpdates
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
