"""Communicators: groups of ranks and their collectives.

A complete example with a group of one rank:

>>> import numpy as np
>>> from unisono.communicator import init
>>> comm = init(rank=0, size=1, rendezvous="a tour of the communicator")
>>> x = comm.all_reduce(np.arange(4.0), "max")  # in place, like the next four calls
>>> x = comm.reduce(x, root=0)
>>> x = comm.broadcast(x, root=0)
>>> x = comm.exscan(comm.scan(x))
>>> y = comm.all_gather(x)  # out=None: a new array
>>> y = comm.reduce_scatter(y, op="avg")
>>> y = comm.all_to_all(y)
>>> y = comm.scatter(comm.gather(y, root=0), root=0)
>>> z = comm.all_gather_v(y, counts=[4])  # pieces of any length
>>> z = comm.reduce_scatter_v(z, counts=[4])
>>> z = comm.all_to_all_v(z, send_counts=[4])
>>> z = comm.scatter_v(comm.gather_v(z), counts=[4])
>>> work = comm.send(z, dst=0, tag=1, async_op=True)
>>> comm.recv(x, src=0, tag=1)  # returns the source rank
0
>>> work.wait()
>>> z = comm.sendrecv(x, dst=0, out=np.empty(4), src=0)
>>> z = comm.neighbor_exchange([z, z], neighbors=[0, 0])[1]
>>> x.tolist() == z.tolist() == [0.0, 1.0, 2.0, 3.0]
True
>>> group, part = comm.group([0]), comm.split(color=comm.rank % 2)
>>> group.barrier()
>>> group.abort("an example")
>>> group.close()
>>> with part.shrink() as left:
...     left.size
1
>>> with comm.batch():  # both calls begin at the end of the block
...     a, b = comm.all_reduce(x), comm.all_reduce(z)
>>> comm.refuse("broadcast", ValueError("nothing to send"))  # replaces the call
>>> print(comm.explain("broadcast", 1 << 20).runner_up is None)
False
>>> comm.close()
"""

from typing import TYPE_CHECKING

from unisono.communicator.arguments import as_integer as as_integer
from unisono.communicator.arguments import check_rank as check_rank
from unisono.communicator.arrays import check_writable as check_writable
from unisono.communicator.arrays import dtype_of
from unisono.communicator.arrays import empty_like as empty_like
from unisono.communicator.c_interface import get_include, group_address
from unisono.communicator.call_cache import common_name as common_name
from unisono.communicator.communicator import Communicator
from unisono.communicator.communicator_stats import CommunicatorStats, OperationStats
from unisono.communicator.communicator_stats import bytes_sent as bytes_sent
from unisono.communicator.engine import Call as Call
from unisono.communicator.estimate import estimate_call_s
from unisono.communicator.explanation import Estimate, Explanation
from unisono.communicator.found_failure import fail_group as fail_group
from unisono.communicator.found_failure import has_failed as has_failed
from unisono.communicator.fused_all_reduce import FusedAllReduce
from unisono.communicator.initialization import init, join
from unisono.communicator.point_to_point import wait_for_message as wait_for_message
from unisono.communicator.premul import premul_sum
from unisono.communicator.value_index import pairs
from unisono.communicator.voted_all_reduce import VotedAllReduce
from unisono.communicator.voted_collectives import VotedWork
from unisono.communicator.voted_collectives import begin_unvoted as begin_unvoted
from unisono.communicator.voted_collectives import begin_voted as begin_voted
from unisono.communicator.voted_collectives import call_of as call_of
from unisono.communicator.windows import Window
from unisono.communicator.work import Work
from unisono.lazy_names import lazy_names
from unisono.selection import IntRange, Measured, Rule, Selection

if TYPE_CHECKING:
    from unisono.communicator.store_join import join_by_store as join_by_store

# Most ranks find each other without a store of another library.
__getattr__ = lazy_names(__name__, {"unisono.communicator.store_join": ["join_by_store"]})

__all__ = [
    "Communicator",
    "CommunicatorStats",
    "Estimate",
    "Explanation",
    "FusedAllReduce",
    "IntRange",
    "Measured",
    "OperationStats",
    "Rule",
    "Selection",
    "VotedAllReduce",
    "VotedWork",
    "Window",
    "Work",
    "dtype_of",
    "estimate_call_s",
    "get_include",
    "group_address",
    "init",
    "join",
    "pairs",
    "premul_sum",
]
