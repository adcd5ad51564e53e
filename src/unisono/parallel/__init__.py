"""Parallel training strategies for torch models.

`data_parallel` averages gradients over all ranks while backward runs; `DistributedOptimizer` does
the same behind an optimizer.
"""

from unisono.parallel.data_parallel import DataParallel, data_parallel
from unisono.parallel.distributed_optimizer import DistributedOptimizer

__all__ = ["DataParallel", "DistributedOptimizer", "data_parallel"]
