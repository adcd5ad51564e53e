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
embedding tables. The repository's folder `planner_fit/` fits the constants to published runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.lazy_names import lazy_names

if TYPE_CHECKING:
    from unisono.planner import recommendation
    from unisono.planner.bottleneck_plot import bottleneck_svg, save_bottleneck_plot
    from unisono.planner.checkpoint_interval import CheckpointPlan, checkpoint_plan
    from unisono.planner.inputs.device_cluster import Cluster
    from unisono.planner.inputs.devices import Device, catalogue
    from unisono.planner.inputs.hugging_face import from_hugging_face
    from unisono.planner.inputs.layout import Layout
    from unisono.planner.inputs.layout_check import divides_heads, require_heads
    from unisono.planner.inputs.model_presets import PRESETS, load_model
    from unisono.planner.inputs.tensor_grid import layer_elements
    from unisono.planner.inputs.training_flops import forward_flops
    from unisono.planner.inputs.transformer import Transformer
    from unisono.planner.inputs.workload import Workload
    from unisono.planner.layout_search.device_scaling import scaling_curve
    from unisono.planner.layout_search.front_plot import save_front_plot
    from unisono.planner.layout_search.layout_candidates import Candidate, Candidates, SearchCounts
    from unisono.planner.layout_search.layout_front import pareto_front
    from unisono.planner.layout_search.search import search
    from unisono.planner.memory.memory_changes import smallest_change
    from unisono.planner.memory.zero_states import state_bytes
    from unisono.planner.own_measurements.calibrate_files import calibrate
    from unisono.planner.own_measurements.calibration import Calibration
    from unisono.planner.own_measurements.measured_runs import read_own_runs
    from unisono.planner.prediction import Prediction, predict
    from unisono.planner.step_sensitivity import sensitivity
    from unisono.planner.training_cost import training_run, training_seconds

_NAMES = {
    "bottleneck_plot": ("bottleneck_svg", "save_bottleneck_plot"),
    "checkpoint_interval": (
        "CheckpointPlan",
        "checkpoint_plan",
    ),
    "inputs.device_cluster": ("Cluster",),
    "inputs.devices": (
        "Device",
        "catalogue",
    ),
    "inputs.hugging_face": ("from_hugging_face",),
    "inputs.layout": ("Layout",),
    "inputs.layout_check": (
        "divides_heads",
        "require_heads",
    ),
    "inputs.model_presets": (
        "PRESETS",
        "load_model",
    ),
    "inputs.tensor_grid": ("layer_elements",),
    "inputs.training_flops": ("forward_flops",),
    "inputs.transformer": ("Transformer",),
    "inputs.workload": ("Workload",),
    "layout_search.device_scaling": ("scaling_curve",),
    "layout_search.front_plot": ("save_front_plot",),
    "layout_search.layout_candidates": ("Candidate", "Candidates", "SearchCounts"),
    "layout_search.layout_front": ("pareto_front",),
    "layout_search.search": ("search",),
    "memory.memory_changes": ("smallest_change",),
    "memory.zero_states": ("state_bytes",),
    "own_measurements.calibration": ("Calibration",),
    "own_measurements.calibrate_files": ("calibrate",),
    "own_measurements.measured_runs": ("read_own_runs",),
    "prediction": (
        "Prediction",
        "predict",
    ),
    "step_sensitivity": ("sensitivity",),
    "training_cost": (
        "training_run",
        "training_seconds",
    ),
}
__getattr__ = lazy_names(
    __name__,
    {f"{__name__}.{module}": names for module, names in _NAMES.items()}
    | {__name__: ("recommendation",)},
)

__all__ = [
    "PRESETS",
    "Calibration",
    "Candidate",
    "Candidates",
    "CheckpointPlan",
    "Cluster",
    "Device",
    "Layout",
    "Prediction",
    "SearchCounts",
    "Transformer",
    "Workload",
    "bottleneck_svg",
    "calibrate",
    "catalogue",
    "checkpoint_plan",
    "divides_heads",
    "forward_flops",
    "from_hugging_face",
    "layer_elements",
    "load_model",
    "pareto_front",
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
    "training_run",
    "training_seconds",
]
