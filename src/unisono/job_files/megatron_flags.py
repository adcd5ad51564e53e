"""Reads a job of Megatron-LM, or the options of a recipe of Megatron-Bridge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from unisono.job_files.megatron_model import MODEL_FLAGS, OTHER_MODELS, MegatronModel
from unisono.job_files.script_flags import ScriptFlags
from unisono.job_files.similar_job import SimilarJob
from unisono.job_files.unread_settings import known_kind, sorted_settings
from unisono.planner import Transformer, load_model

_SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "et": "expert_tensor_parallel_size",
    "mb": "micro_batch_size",
    "gb": "global_batch_size",
    "ng": "num_gpus",
    "sl": "seq_length",
    "N": "nodes",
}
"""Short options of the scripts of Megatron-Bridge, torchrun and Slurm."""
_AXES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "num_distributed_optimizer_instances": "dp_replicate",
}
_SIZES = {
    "seq_length": "seq",
    "sequence_length": "seq",
    "global_batch_size": "global_batch",
    "micro_batch_size": "micro_batch",
}
_SWITCHES = (
    *("sequence_parallel", "use_distributed_optimizer", "recompute_activations"),
    *("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp"),
    *("overlap_moe_expert_parallel_comm", "bf16", "fp16", "fp8_hybrid"),
)
_OTHERS = (
    *("expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("data_parallel_sharding_strategy", "fp8_format", "fp8", "fp8_recipe", "fp4", "fp4_format"),
    *("precision_config", "compute_dtype", "cuda_graph_scope", "attention_backend"),
    *("model_recipe_name", "recipe", "recipe_name", "optimizer_cpu_offload", "cpu_offloading"),
    *("cp_comm_type", "activations_checkpoint_method", "checkpoint_activations"),
)
_DEVICES = (
    *("num_gpus", "world_size", "nproc_per_node", "gpus_per_node", "ntasks_per_node"),
    *("nnodes", "nodes", "num_nodes"),
)
_CONTEXTS = {"a2a": "ulysses", "all_gather": "allgather"}
_RECIPE = re.compile(r"\b([a-z]\w*?)_(?:pretrain|sft|finetune|peft)(?:_\w+)?_config\b")
"""The name of a recipe of Megatron-Bridge in Python."""
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def read_megatron(text: str) -> SimilarJob:
    """Returns the job of a shell script, an argument list, or a recipe's options. Raises ValueError
    for values that cannot exist.

    >>> job = read_megatron("--num-layers 2 --tensor-model-parallel-size 4 --seq-length 128 --lr 1")
    >>> job.layout["tp"], dict(job.workload), job.without_effect
    (4, {'seq': 128, 'precision': 'fp32'}, ('--lr',))
    """
    names = {*_AXES, *_SIZES, *_SWITCHES, *_OTHERS, *_DEVICES, *MODEL_FLAGS}
    other = re.search(r"pretrain_(bert|t5|ict|mamba|vision\w*|vlm|mimo|retro)", text)
    flags = ScriptFlags(text, names=names, short=_SHORT)
    recipe = _RECIPE.search(text)
    if recipe and not {"recipe", "recipe_name", "model_recipe_name"} & flags.values.keys():
        flags.values["recipe"] = recipe[1]
    return _MegatronJob(flags, program=other[0] if other else "").job()


class _MegatronJob:
    """The flags of a job, and what has been said about them."""

    def __init__(self, flags: ScriptFlags, *, program: str) -> None:
        self._program = program
        self._values = {_SHORT.get(name, name): value for name, value in flags.values.items()}
        self._unclear = {_SHORT.get(name, name): why for name, why in flags.unclear.items()}
        for name in self._unclear:
            self._values.pop(name, None)
        self._notes: list[str] = []

    def job(self) -> SimilarJob:
        """Returns the job."""
        missing = {
            "--" + {"seq": "seq", "global_batch": "batch"}.get(_SIZES.get(name, ""), "layout"): (
                f"--{name.replace('_', '-')} {why}"
            )
            for name, why in self._unclear.items()
            if name in _SIZES or name in _AXES or name in _SWITCHES or name in _OTHERS
        }
        model = self._model(missing)
        layout, workload = self._layout(model), self._workload()
        if self._is_recipe:
            self._of_recipe(layout, workload, missing)
        rest = self._rest()
        return SimilarJob(
            source="Megatron-Bridge" if self._is_recipe else "Megatron-LM",
            model=model,
            layout=layout,
            workload=workload,
            devices=self._devices(),
            missing=missing,
            notes=tuple(self._notes),
            assumed=rest["assumed"],
            without_effect=rest["without effect"],
            unknown=rest["unknown"],
        )

    @property
    def _is_recipe(self) -> bool:
        """True for options of Megatron-Bridge, whose recipe has the values that are not stated."""
        return any(name in self._values for name in ("model_recipe_name", "recipe", "recipe_name"))

    def _of_recipe(
        self, layout: dict[str, Any], workload: dict[str, Any], missing: dict[str, str]
    ) -> None:
        """Changes what a recipe usually states, and adds what only the recipe knows."""
        axes = [axis for axis in ("tp", "pp", "cp", "ep") if axis not in layout]
        if axes and "--layout" not in missing:
            missing["--layout"] = f"the values of {', '.join(axes)} are only in the recipe"
        usual = []
        if "sequence_parallel" not in self._values:
            layout["sequence_parallel"] = layout.get("tp", 1) > 1
            usual.append("sequence_parallel with tp")
        if "use_distributed_optimizer" not in self._values and not layout["zero"]:
            layout["zero"] = 1
            usual.append("the distributed optimizer")
        if "recompute_granularity" not in self._values:
            workload.pop("recompute", None)
            usual.append("the fastest recomputation that fits")
        if usual:
            self._notes.append(f"the recipe is read with {', '.join(usual)}")

    def _on(self, name: str) -> bool:
        """Returns True for a switch that is stated and not false."""
        return self._values.get(name, "false").lower() not in ("false", "0", "no", "none")

    def _count(self, name: str) -> int | None:
        value = self._values.get(name)
        if value is None or value.lower() in ("none", "null", ""):
            return None
        if not value.isdecimal() or int(value) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be a whole number, not {value!r}")
        return int(value)

    def _model(self, missing: dict[str, str]) -> Transformer | None:
        names = (self._values.get(name) for name in ("model_recipe_name", "recipe", "recipe_name"))
        recipe = next(filter(None, names), None)
        if recipe is not None:
            name = recipe.split("_pretrain")[0].split("_sft")[0].split("_config")[0]
            try:
                return load_model(name.replace("_", "-"))
            except ValueError as error:
                missing["--model"] = f"of the recipe {recipe}, {error}"
                return None
        unclear = [f"--{n.replace('_', '-')} {why}" for n, why in self._unclear.items()]
        unclear = [each for each in unclear if each.split()[0][2:].replace("-", "_") in MODEL_FLAGS]
        if unclear:
            missing["--model"] = "; ".join(unclear)
            return None
        other = [name for name in self._values if name.startswith(OTHER_MODELS)]
        if self._program or other:
            what = self._program or f"--{other[0].replace('_', '-')}"
            missing["--model"] = f"{what} is of a model that flags do not describe here"
            return None
        named = dict.fromkeys(self._unclear, "")
        reader = MegatronModel(
            {**named, **self._values}, tp=self._count("tensor_model_parallel_size") or 1
        )
        model = reader.model()
        self._notes += reader.notes
        if model is None:
            missing["--model"] = f"the file has no {', '.join(reader.missing)}"
        return model

    def _layout(self, model: Transformer | None) -> dict[str, Any]:
        found: dict[str, Any] = {
            axis: count for name, axis in _AXES.items() if (count := self._count(name)) is not None
        }
        found["sequence_parallel"] = self._on("sequence_parallel") and found.get("tp", 1) > 1
        found["zero"] = self._zero()
        self._experts(found)
        pp, groups = found.get("pp", 1), self._count("virtual_pipeline_model_parallel_size")
        groups = groups or self._count("num_virtual_stages_per_pipeline_rank")
        layers = self._count("num_layers_per_virtual_pipeline_stage")
        if layers and model is not None:
            groups = max(model.layers // (pp * layers), 1)
        if groups and pp > 1:
            found["vpp"] = groups
        return found

    def _zero(self) -> int:
        strategy = self._values.get("data_parallel_sharding_strategy")
        if strategy is not None:
            if strategy not in _STRATEGIES:
                known = ", ".join(_STRATEGIES)
                raise ValueError(
                    f"--data-parallel-sharding-strategy must be one of {known}, not {strategy!r}"
                )
            return _STRATEGIES.index(strategy)
        if self._on("use_torch_fsdp2"):
            return 3
        return 1 if self._on("use_distributed_optimizer") else 0

    def _experts(self, found: dict[str, Any]) -> None:
        """Changes `ep` if tensor parallelism divides experts that `ep` divides too."""
        ep, tp = found.get("ep", 1), found.get("tp", 1)
        # Megatron-LM divides experts among `tp` ranks by default; recipes do not.
        parts = self._count("expert_tensor_parallel_size") or (1 if self._is_recipe else tp)
        if ep > 1 and parts > 1:
            found["ep"] = ep * parts
            self._notes.append(
                f"ep {ep} with experts divided among {parts} ranks is read as ep {ep * parts}, "
                "which has as many bytes on each device"
            )

    def _workload(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            field: count for name, field in _SIZES.items() if (count := self._count(name))
        }
        found["precision"] = self._precision()
        kind = self._values.get("cp_comm_type", "p2p").split("+")[0].strip()
        if kind in _CONTEXTS:
            found["context"] = _CONTEXTS[kind]
        granularity = self._values.get("recompute_granularity", "").lower()
        if granularity in ("selective", "full"):
            found["recompute"] = granularity
        elif self._on("recompute_activations"):
            found["recompute"] = "selective"
        elif any(map(self._on, ("activations_checkpoint_method", "checkpoint_activations"))):
            found["recompute"] = "full"  # names of 2021
        elif "global_batch_size" in self._values or "micro_batch_size" in self._values:
            found["recompute"] = "none"
        if granularity == "full" and self._values.get("recompute_method") == "block":
            layers = self._values.get("recompute_num_layers", "some")
            self._notes.append(f"full recomputation of {layers} layers is read as of all layers")
        if self._on("optimizer_cpu_offload"):
            found["offload"] = True
        if self._on("cpu_offloading"):
            self._notes.append("--cpu-offloading is left out: activations are on the device")
        if self._on("overlap_moe_expert_parallel_comm"):
            found["software"] = "megatron-2025"
        if self._values.get("cuda_graph_scope") == "full_iteration":
            found["software"] = "megatron-2026"
        return found

    def _precision(self) -> str:
        stated = self._values.get("precision_config", "") + self._values.get("compute_dtype", "")
        for kind in ("fp4", "fp8"):
            flags = (f"{kind}_format", kind, f"{kind}_hybrid", f"{kind}_recipe")
            if "nv" + kind in stated or kind in stated or any(self._on(name) for name in flags):
                return kind
        if self._on("bf16") or "bf16" in stated or self._is_recipe:
            return "bf16"
        return "fp16" if self._on("fp16") else "fp32"

    def _devices(self) -> int | None:
        whole = self._count("num_gpus") or self._count("world_size")
        if whole:
            return whole
        hosts = next(filter(None, map(self._count_or_none, ("nnodes", "nodes", "num_nodes"))), None)
        names = ("nproc_per_node", "gpus_per_node", "ntasks_per_node")
        each = next(filter(None, map(self._count_or_none, names)), None)
        return None if each is None else each * (hosts or 1)

    def _count_or_none(self, name: str) -> int | None:
        value = self._values.get(name, "")
        return int(value) if value.isdecimal() and int(value) > 0 else None

    def _rest(self) -> Mapping[str, tuple[str, ...]]:
        """Returns the flags that were not read, by what they mean here."""
        read = {*_AXES, *_SIZES, *_SWITCHES, *_OTHERS, *_DEVICES, *MODEL_FLAGS}
        names = [name for name in self._values if name not in read]
        return sorted_settings(
            (f"--{name.replace('_', '-')}", known_kind("megatron", name)) for name in names
        )
