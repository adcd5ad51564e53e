"""Parallel training strategies for torch models.

`data_parallel` averages gradients over all ranks while backward runs; `DistributedOptimizer` does
the same behind an optimizer. Both compress gradients: `Fp16`, `Bf16`, `PowerSGD`, `Int8`, `TopK`.
With `LocalSGD` and `DiLoCo` each rank trains alone for several steps. `ParameterServer` keeps the
parameters and the optimizer on servers, and trains synchronously or asynchronously.

`ShardedOptimizer` is ZeRO-1. A `Layout` defines how the ranks divide a model and its batch;
`RankGrid` computes the ranks of each axis; `TrainingMesh` makes the process groups of the axes and
counts the bytes on each group. `CounterRandom` draws weights and masks that do not depend on the
layout.

`parallelize` divides a model by a layout and returns its `ParallelRun`; with `model_loss`, it
trains by the loss that the model computes itself, and with `Precision`, in types of 16 bits.
`WeightAverage` averages the weights of a run over its steps. `divisible` has what a program needs
to make its own modules divisible. `TransformerModel` with `CrossEntropy` is a model that every
strategy can divide. `DLRM` is a recommendation model whose embedding tables are divided over the
ranks; `place_tables` chooses the ranks of each table.
"""

from typing import TYPE_CHECKING

from unisono.lazy_names import lazy_names

if TYPE_CHECKING:
    from unisono.parallel.checkpoint import PendingSave
    from unisono.parallel.compression.int8_codec import Int8
    from unisono.parallel.compression.narrow_float_exchange import Bf16, Fp16
    from unisono.parallel.compression.power_sgd import PowerSGD
    from unisono.parallel.compression.top_k_codec import TopK
    from unisono.parallel.counter_random import CounterRandom
    from unisono.parallel.data_parallelism.compression_state import Compression
    from unisono.parallel.data_parallelism.data_parallel_model import DataParallel, data_parallel
    from unisono.parallel.data_parallelism.diloco import DiLoCo, nesterov_sgd
    from unisono.parallel.data_parallelism.distributed_optimizer import DistributedOptimizer
    from unisono.parallel.data_parallelism.local_sgd import LocalSGD
    from unisono.parallel.data_parallelism.sharded_optimizer import ShardedOptimizer
    from unisono.parallel.forecast import RunBuilder, StepForecast, forecast_step
    from unisono.parallel.layers import CrossEntropy, TransformerModel, draw_weights
    from unisono.parallel.module_shape import model_shape
    from unisono.parallel.parameter_server import LostUpdates, ParameterServer, ParameterServerStats
    from unisono.parallel.precision import Precision
    from unisono.parallel.rank_grid import RankGrid
    from unisono.parallel.recommendation import (
        DLRM,
        DLRMShape,
        PlacedTable,
        TablePlacement,
        TableShape,
        dlrm_shape,
        place_tables,
    )
    from unisono.parallel.run import (
        ParallelRun,
        RunReport,
        WeightAverage,
        model_loss,
        parallelize,
        pipeline_schedule,
    )
    from unisono.parallel.tensor_plan import ModelPlan, plan
    from unisono.parallel.training_mesh import TrainingMesh
    from unisono.planner import Layout

# The first use of a name imports its module, since the parts of torch take seconds to import.
__getattr__ = lazy_names(
    __name__,
    {
        "unisono.parallel.checkpoint": ["PendingSave"],
        "unisono.parallel.data_parallelism.compression_state": ["Compression"],
        "unisono.parallel.counter_random": ["CounterRandom"],
        "unisono.parallel.data_parallelism.data_parallel_model": ["DataParallel", "data_parallel"],
        "unisono.parallel.data_parallelism.diloco": ["DiLoCo", "nesterov_sgd"],
        "unisono.parallel.data_parallelism.distributed_optimizer": ["DistributedOptimizer"],
        "unisono.parallel.compression.int8_codec": ["Int8"],
        "unisono.parallel.forecast": ["RunBuilder", "StepForecast", "forecast_step"],
        "unisono.parallel.layers": ["CrossEntropy", "TransformerModel", "draw_weights"],
        "unisono.parallel.data_parallelism.local_sgd": ["LocalSGD"],
        "unisono.parallel.module_shape": ["model_shape"],
        "unisono.parallel.compression.narrow_float_exchange": ["Bf16", "Fp16"],
        "unisono.parallel.parameter_server": [
            "LostUpdates",
            "ParameterServer",
            "ParameterServerStats",
        ],
        "unisono.parallel.compression.power_sgd": ["PowerSGD"],
        "unisono.parallel.precision": ["Precision"],
        "unisono.parallel.rank_grid": ["RankGrid"],
        "unisono.parallel.recommendation": [
            "DLRM",
            "DLRMShape",
            "PlacedTable",
            "TablePlacement",
            "TableShape",
            "dlrm_shape",
            "place_tables",
        ],
        "unisono.parallel.run": [
            "ParallelRun",
            "RunReport",
            "WeightAverage",
            "model_loss",
            "parallelize",
            "pipeline_schedule",
        ],
        "unisono.parallel.data_parallelism.sharded_optimizer": ["ShardedOptimizer"],
        "unisono.parallel.tensor_plan": ["ModelPlan", "plan"],
        "unisono.parallel.compression.top_k_codec": ["TopK"],
        "unisono.parallel.training_mesh": ["TrainingMesh"],
        "unisono.planner": ["Layout"],
    },
)

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
    "ModelPlan",
    "ParallelRun",
    "ParameterServer",
    "ParameterServerStats",
    "PendingSave",
    "PlacedTable",
    "PowerSGD",
    "Precision",
    "RankGrid",
    "RunBuilder",
    "RunReport",
    "ShardedOptimizer",
    "StepForecast",
    "TablePlacement",
    "TableShape",
    "TopK",
    "TrainingMesh",
    "TransformerModel",
    "WeightAverage",
    "data_parallel",
    "dlrm_shape",
    "draw_weights",
    "forecast_step",
    "model_loss",
    "model_shape",
    "nesterov_sgd",
    "parallelize",
    "pipeline_schedule",
    "place_tables",
    "plan",
]
