"""Parallel training strategies for torch models.

`data_parallel` averages gradients over all ranks while backward runs; `DistributedOptimizer` does
the same behind an optimizer. Both compress gradients: `Fp16`, `Bf16`, `PowerSGD`, `Int8`, `TopK`.
`LocalSGD` and `DiLoCo` let ranks train alone for several steps. `ParameterServer` keeps the
parameters and the optimizer on servers, synchronous or not.

`ShardedOptimizer` is ZeRO-1. A `Layout` says how the ranks divide a model and its batch; `RankGrid`
computes the ranks of each axis; `TrainingMesh` makes their process groups, and counts the bytes on
each. `CounterRandom` draws the same weights and masks whatever the layout.

`parallelize` divides a model by a layout and returns its `ParallelRun`. `TransformerModel` with
`CrossEntropy` is a model that every strategy can divide. `DLRM` is a recommendation model with
embedding tables on all ranks; `place_tables` chooses their ranks.
"""

from unisono.parallel.compression import Compression
from unisono.parallel.counter_random import CounterRandom
from unisono.parallel.data_parallel import DataParallel, data_parallel
from unisono.parallel.diloco import DiLoCo, nesterov_sgd
from unisono.parallel.distributed_optimizer import DistributedOptimizer
from unisono.parallel.int8_codec import Int8
from unisono.parallel.layers import CrossEntropy, TransformerModel, draw_weights
from unisono.parallel.local_sgd import LocalSGD
from unisono.parallel.module_shape import model_shape
from unisono.parallel.narrow_float_exchange import Bf16, Fp16
from unisono.parallel.parameter_server import LostUpdates, ParameterServer, ParameterServerStats
from unisono.parallel.power_sgd import PowerSGD
from unisono.parallel.rank_grid import RankGrid
from unisono.parallel.recommendation import (
    DLRM,
    DLRMShape,
    PlacedTable,
    TablePlacement,
    TableShape,
    place_tables,
)
from unisono.parallel.run import ParallelRun, RunReport, parallelize
from unisono.parallel.sharded_optimizer import ShardedOptimizer
from unisono.parallel.top_k_codec import TopK
from unisono.parallel.training_mesh import TrainingMesh
from unisono.planner import Layout

__all__ = [
    "DLRM",
    "Bf16",
    "Compression",
    "CounterRandom",
    "CrossEntropy",
    "DLRMShape",
    "DataParallel",
    "DiLoCo",
    "DistributedOptimizer",
    "Fp16",
    "Int8",
    "Layout",
    "LocalSGD",
    "LostUpdates",
    "ParallelRun",
    "ParameterServer",
    "ParameterServerStats",
    "PlacedTable",
    "PowerSGD",
    "RankGrid",
    "RunReport",
    "ShardedOptimizer",
    "TablePlacement",
    "TableShape",
    "TopK",
    "TrainingMesh",
    "TransformerModel",
    "data_parallel",
    "draw_weights",
    "model_shape",
    "nesterov_sgd",
    "parallelize",
    "place_tables",
]
