"""Inputs that a caller states as objects or as the texts of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from unisono.planner.inputs.device_cluster import Cluster
from unisono.planner.inputs.layout import Layout
from unisono.planner.inputs.model_presets import load_model
from unisono.planner.inputs.transformer import Transformer
from unisono.planner.inputs.workload import Workload

if TYPE_CHECKING:
    from unisono.launch import Executor


def stated_model(model: Transformer | str | Path) -> Transformer:
    """Returns the model of a name or a file; other models unchanged. Raises TypeError, and
    ValueError for a name of no transformer.
    """
    if isinstance(model, Transformer):
        return model
    if str(model).lower().startswith("dlrm"):  # a name, or the text of a `Dlrm`
        raise ValueError(
            "recommendation models have functions of their own: predict and search of "
            "unisono.planner.recommendation"
        )
    if not isinstance(model, str | Path):
        raise _wrong("model", "a Transformer or a name such as 'llama3-8b'", model)
    return load_model(model)


def stated_cluster(cluster: Cluster | str) -> Cluster:
    """Returns the cluster of a text such as "h100:8"; other clusters unchanged. Raises TypeError.

    >>> stated_cluster("h100:8").devices
    8
    """
    if isinstance(cluster, str):
        return Cluster.read(cluster)
    if not isinstance(cluster, Cluster):
        raise _wrong("cluster", "a Cluster or a text such as 'h100:8'", cluster)
    return cluster


def stated_layout(layout: Layout | str) -> Layout:
    """Returns the layout of a text such as "dp=2,tp=4"; other layouts unchanged. Raises
    TypeError.
    """
    if isinstance(layout, str):
        return Layout.read(layout)
    if not isinstance(layout, Layout):
        raise _wrong("layout", "a Layout or a text such as 'dp=2,tp=4'", layout)
    return layout


def require_workload(job: Workload) -> None:
    """Raises TypeError if the workload is none."""
    if not isinstance(job, Workload):
        raise _wrong("job", "a Workload, such as Workload(seq=2048, global_batch=64)", job)


def require_executor(executor: Executor | None) -> None:
    """Raises TypeError if `executor` cannot run tasks."""
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise _wrong(
            "executor",
            "an object with a method submit(fn, *args), such as ProcessPoolExecutor(4)",
            executor,
        )


def _wrong(name: str, right: str, value: object) -> TypeError:
    return TypeError(f"{name} must be {right}, not {value!r}")
