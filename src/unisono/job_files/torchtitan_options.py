"""Reads a job configuration of torchtitan (TOML)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from unisono.job_files.similar_job import SimilarJob
from unisono.job_files.unread_settings import known_kind, sorted_settings
from unisono.planner import Transformer, load_model

_AXES = {
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
    "context_parallel_degree": "cp",
    "expert_parallel_degree": "ep",
    "data_parallel_replicate_degree": "dp_replicate",
}
_SCHEDULES = {
    "1f1b": "1f1b",
    "interleaved1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleavedzerobubble": "zb1p",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipev",
}
_OTHER_MODELS = {
    "llama4-17bx16e": "llama4-scout",
    "llama4-17bx128e": "llama4-maverick",
    "deepseekv3-671b": "deepseek-v3",
    "deepseekv3-236b": "deepseek-v2",
    "deepseekv3-16b": "deepseek-v2-lite",
}
_READ = {
    "model": ("name", "flavor", "converters", "print_after_conversion"),
    "training": (
        *("local_batch_size", "batch_size", "global_batch_size", "seq_len"),
        *("mixed_precision_param", "compile", "enable_cpu_offload"),
    ),
    "parallelism": (
        *(*_AXES, "data_parallel_shard_degree", "pipeline_parallel_schedule"),
        *("pipeline_parallel_microbatch_size", "fsdp_reshard_after_forward"),
        "context_parallel_rotate_method",
    ),
    "experimental": (*_AXES, "pipeline_parallel_schedule"),
    "activation_checkpoint": ("mode",),
    "compile": ("enable", "components"),
}


def read_torchtitan(text: str) -> SimilarJob:
    """Returns the job of a configuration. Raises ValueError for values that cannot exist.

    >>> job = read_torchtitan('''
    ... [model]
    ... name = "llama3"
    ... flavor = "8B"
    ... [training]
    ... local_batch_size = 1
    ... seq_len = 8192
    ... [activation_checkpoint]
    ... mode = "selective"
    ... ''')
    >>> job.layout["zero"], job.workload["recompute"], round(job.model.parameters / 1e9)
    (3, 'selective', 8)
    """
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"no TOML: {error}") from error
    return _TorchtitanJob(config).job()


class _TorchtitanJob:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._notes: list[str] = []
        self._missing: dict[str, str] = {}

    def job(self) -> SimilarJob:
        """Returns the job."""
        model, layout = self._model(), self._layout()
        rest = self._rest()
        return SimilarJob(
            source="torchtitan",
            model=model,
            layout=layout,
            workload=self._workload(layout),
            replica_batch=self._local_batch(),
            devices=None,
            missing=self._missing,
            notes=tuple(self._notes),
            assumed=rest["assumed"],
            without_effect=rest["without effect"],
            unknown=rest["unknown"],
        )

    def _get(self, table: str, name: str, default: Any = None) -> Any:
        return (self._config.get(table) or {}).get(name, default)

    def _model(self) -> Transformer | None:
        name, flavor = self._get("model", "name"), self._get("model", "flavor")
        if name is None or flavor is None:
            self._missing["--model"] = "the file has no name and flavor in [model]"
            return None
        # As in "llama3" with "8B", and "qwen3" with "30B-A3B".
        stated = f"{str(name).replace('_', '')}-{str(flavor).lower()}"
        try:
            return load_model(_OTHER_MODELS.get(stated, stated))
        except ValueError as error:
            self._missing["--model"] = str(error)
            return None

    def _layout(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, axis in _AXES.items():
            value = self._get("parallelism", name, self._get("experimental", name))
            if value is not None:
                found[axis] = _count(name, value)
        shards = self._get("parallelism", "data_parallel_shard_degree", -1)
        # fully_shard divides among dp_shard x cp; with neither, DistributedDataParallel sums.
        is_sharded = shards != 1 or found.get("cp", 1) > 1
        found["zero"] = 3 if is_sharded else 0
        if not is_sharded:
            found.pop("dp_replicate", None)
        if self._get("parallelism", "fsdp_reshard_after_forward") == "never" and is_sharded:
            found["zero"] = 2
        found["sequence_parallel"] = found.get("tp", 1) > 1
        if found.get("pp", 1) > 1:
            found |= self._schedule()
        return found

    def _schedule(self) -> dict[str, Any]:
        name = self._get("parallelism", "pipeline_parallel_schedule", "1F1B")
        schedule = _SCHEDULES.get(str(name).lower())
        if schedule is None:
            known = ", ".join(_SCHEDULES)
            raise ValueError(f"pipeline_parallel_schedule must be one of {known}, not {name!r}")
        layers = self._get("parallelism", "pipeline_parallel_layers_per_stage")
        if str(name).lower() == "interleavedzerobubble":
            self._notes.append("InterleavedZeroBubble is read as zb1p, with one stage a device")
        if str(name).lower() == "interleaved1f1b" and layers is None:
            return {"schedule": schedule, "vpp": 2}  # torchtitan makes two stages on each rank
        return {"schedule": schedule, "vpp": None if schedule == "1f1b" and layers else 1} | (
            {"vpp": 2} if schedule in ("zbv", "dualpipev") else {}
        )

    def _local_batch(self) -> int | None:
        value = self._get("training", "local_batch_size", self._get("training", "batch_size"))
        return None if value is None else _count("local_batch_size", value)

    def _workload(self, layout: Mapping[str, Any]) -> dict[str, Any]:
        local = self._local_batch()
        found: dict[str, Any] = {}
        for field, value in (
            ("seq", self._get("training", "seq_len")),
            ("micro_batch", local),
            ("global_batch", self._get("training", "global_batch_size")),
        ):
            if value is not None and value != -1:
                found[field] = _count(field, value)
        if layout.get("pp", 1) > 1 and "micro_batch" in found:
            found["micro_batch"] = self._get("parallelism", "pipeline_parallel_microbatch_size", 1)
        if "global_batch" not in found and local is None:
            self._missing["--batch"] = "the file has no local_batch_size"
        if self._get("training", "enable_cpu_offload", False):
            self._notes.append("enable_cpu_offload is left out: all is on the device")
        found["recompute"] = self._get("activation_checkpoint", "mode", "selective")
        compiled = self._get("compile", "enable", self._get("training", "compile", False))
        found["software"] = "torch-fsdp" if compiled else "torch-eager"
        found["precision"] = self._precision()
        if layout.get("cp", 1) > 1:
            rotate = self._get("parallelism", "context_parallel_rotate_method", "allgather")
            found["context"] = "ring" if rotate == "alltoall" else "allgather"
        return found

    def _precision(self) -> str:
        converters = self._get("model", "converters", ())
        if any("float8" in str(each) or "mx" in str(each) for each in converters):
            return "fp8"
        stated = self._get("training", "mixed_precision_param", "bfloat16")
        return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(stated, "bf16")

    def _rest(self) -> Mapping[str, tuple[str, ...]]:
        """Returns the options that were not read, by what they mean here."""
        return sorted_settings(
            (f"{table}.{name}", known_kind("torchtitan", name, table))
            for table, options in self._config.items()
            for name in (options if isinstance(options, Mapping) else ())
            if name not in _READ.get(table, ())
        )


def _count(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    return value
