"""The planner: finds the fastest layout for a model, and predicts step time and memory.

>>> from unisono import planner
>>> model = planner.load_model("gpt3-175b")
>>> cluster = planner.Cluster(device="A100-SXM4-80GB", devices=1024, per_host=8)
>>> layout = planner.Layout(dp=16, tp=8, pp=8, sequence_parallel=True, zero=1)
>>> job = planner.Workload(seq=2048, global_batch=1536, micro_batch=1, recompute="full")
>>> 20 < planner.predict(model, cluster, layout, job).step_s < 35
True

`inputs/` describes model, cluster, layout and workload. `prediction.py` combines the results of
`memory/` and `step_times/`, which use `constants/`. `layout_search/` compares predictions.
`own_measurements/` has the user's own measurements. `recommendation/` predicts models with
embedding tables. The repository's folder `calibration/` fits the constants to published runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.lazy_names import lazy_names

if TYPE_CHECKING:
    from unisono.planner import recommendation
    from unisono.planner.bottleneck_plot import save_bottleneck_plot
    from unisono.planner.checkpoint_interval import (
        FAILURES_PER_DEVICE_HOUR,
        CheckpointPlan,
        checkpoint_plan,
        goodput,
    )
    from unisono.planner.constants.calibrated_constants import (
        CalibratedConstants,
        constants_document,
        default_constants,
    )
    from unisono.planner.inputs.device_cluster import Cluster
    from unisono.planner.inputs.devices import Device, catalogue, device_named
    from unisono.planner.inputs.hugging_face import from_hugging_face
    from unisono.planner.inputs.layout import Layout, nearest_divisor
    from unisono.planner.inputs.layout_check import check_layout, divides_heads, require_heads
    from unisono.planner.inputs.model_presets import (
        PRESETS,
        load_model,
    )
    from unisono.planner.inputs.tensor_grid import layer_elements
    from unisono.planner.inputs.training_flops import forward_flops, step_flops, training_days
    from unisono.planner.inputs.transformer import Transformer
    from unisono.planner.inputs.uneven_parts import part_of
    from unisono.planner.inputs.workload import PRECISIONS, RECOMPUTE, SOFTWARE, Workload
    from unisono.planner.layout_search.device_scaling import ScalingPoint, scaling_curve
    from unisono.planner.layout_search.front_plot import save_front_plot
    from unisono.planner.layout_search.layout_candidates import Candidate, Candidates, SearchCounts
    from unisono.planner.layout_search.layout_front import pareto_front
    from unisono.planner.layout_search.search import OBJECTIVES, search
    from unisono.planner.memory.activation_bytes import (
        layer_activation_bytes,
    )
    from unisono.planner.memory.memory_changes import MemoryChange, smallest_change
    from unisono.planner.memory.zero_states import StateBytes, state_bytes
    from unisono.planner.own_measurements.calibration import Calibration, LinkRate
    from unisono.planner.own_measurements.calibration_from_files import calibrate
    from unisono.planner.own_measurements.measured_run import MeasuredRun
    from unisono.planner.own_measurements.own_run import OwnRun
    from unisono.planner.own_measurements.own_runs import read_own_runs
    from unisono.planner.prediction import Prediction, predict
    from unisono.planner.step_sensitivity import Sensitivity, sensitivity
    from unisono.planner.step_times.time_tree import TimeNode
    from unisono.planner.training_cost import RunCost, training_run, training_seconds

_NAMES = {
    "checkpoint_interval": (
        "FAILURES_PER_DEVICE_HOUR",
        "CheckpointPlan",
        "checkpoint_plan",
        "goodput",
    ),
    "layout_search.front_plot": ("save_front_plot",),
    "layout_search.search": (
        "OBJECTIVES",
        "search",
    ),
    "own_measurements.calibration_from_files": ("calibrate",),
    "own_measurements.own_runs": ("read_own_runs",),
    "layout_search.layout_front": ("pareto_front",),
    "own_measurements.calibration": (
        "Calibration",
        "LinkRate",
    ),
    "own_measurements.measured_run": ("MeasuredRun",),
    "own_measurements.own_run": ("OwnRun",),
    "layout_search.device_scaling": (
        "ScalingPoint",
        "scaling_curve",
    ),
    "step_sensitivity": (
        "Sensitivity",
        "sensitivity",
    ),
    "training_cost": (
        "RunCost",
        "training_run",
        "training_seconds",
    ),
    "memory.activation_bytes": ("layer_activation_bytes",),
    "constants.calibrated_constants": (
        "CalibratedConstants",
        "constants_document",
        "default_constants",
    ),
    "inputs.device_cluster": ("Cluster",),
    "inputs.devices": ("Device", "catalogue", "device_named"),
    "inputs.layout": ("Layout", "nearest_divisor"),
    "inputs.tensor_grid": ("layer_elements",),
    "inputs.layout_check": ("check_layout", "divides_heads", "require_heads"),
    "layout_search.layout_candidates": ("Candidate", "Candidates", "SearchCounts"),
    "memory.memory_changes": ("MemoryChange", "smallest_change"),
    "inputs.hugging_face": ("from_hugging_face",),
    "inputs.model_presets": ("PRESETS", "load_model"),
    "prediction": ("Prediction", "predict"),
    "memory.zero_states": ("StateBytes", "state_bytes"),
    "step_times.time_tree": ("TimeNode",),
    "inputs.training_flops": ("forward_flops", "step_flops", "training_days"),
    "inputs.transformer": ("Transformer",),
    "inputs.uneven_parts": ("part_of",),
    "bottleneck_plot": ("save_bottleneck_plot",),
    "inputs.workload": ("PRECISIONS", "RECOMPUTE", "SOFTWARE", "Workload"),
}
__getattr__ = lazy_names(
    __name__,
    {f"{__name__}.{module}": names for module, names in _NAMES.items()}
    | {__name__: ("recommendation",)},
)

__all__ = [
    "FAILURES_PER_DEVICE_HOUR",
    "OBJECTIVES",
    "PRECISIONS",
    "PRESETS",
    "RECOMPUTE",
    "SOFTWARE",
    "CalibratedConstants",
    "Calibration",
    "Candidate",
    "Candidates",
    "CheckpointPlan",
    "Cluster",
    "Device",
    "Layout",
    "LinkRate",
    "MeasuredRun",
    "MemoryChange",
    "OwnRun",
    "Prediction",
    "RunCost",
    "ScalingPoint",
    "SearchCounts",
    "Sensitivity",
    "StateBytes",
    "TimeNode",
    "Transformer",
    "Workload",
    "calibrate",
    "catalogue",
    "check_layout",
    "checkpoint_plan",
    "constants_document",
    "default_constants",
    "device_named",
    "divides_heads",
    "forward_flops",
    "from_hugging_face",
    "goodput",
    "layer_activation_bytes",
    "layer_elements",
    "load_model",
    "nearest_divisor",
    "pareto_front",
    "part_of",
    "predict",
    "read_own_runs",
    "recommendation",
    "require_heads",
    "save_bottleneck_plot",
    "save_front_plot",
    "scaling_curve",
    "search",
    "sensitivity",
    "smallest_change",
    "state_bytes",
    "step_flops",
    "training_days",
    "training_run",
    "training_seconds",
]
