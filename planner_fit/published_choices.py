"""Choices of published runs that `published_runs.csv` leaves open, from published scripts.

The table has only what a source's results state. The scripts that started the runs state more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class PublishedChoices(NamedTuple):
    """Choices of a run. None: the scripts do not state this choice."""

    micro_batch: int | None = None
    vpp: int | None = None
    recompute: str | None = None
    software: str | None = None
    states: str = "mixed"
    expert_vectors: int = 0
    """Elements of the biases of an expert."""
    balanced_gate: bool = False
    """True if the experts of each token have neighbouring numbers, so that few devices have them:
    token t goes to experts k t to k t + k - 1."""


_NARAYANAN = {
    "GPT 1.7B": PublishedChoices(16, 1),
    "GPT 3.6B": PublishedChoices(16, 1),
    "GPT 7.5B": PublishedChoices(16, 1),
    "GPT 18.4B": PublishedChoices(8, 1),
    "GPT 39.1B": PublishedChoices(4, 1),
    "GPT 76.1B": PublishedChoices(2, 3),
    "GPT 145.6B": PublishedChoices(2, 2),
    "GPT 310.1B": PublishedChoices(1, 2),
    "GPT 529.6B": PublishedChoices(1, 3),
    "GPT 1008B": PublishedChoices(1, 1),
}
"""Micro batches and interleaving of table 1 (github NVIDIA/Megatron-LM,
examples/academic_paper_scripts/sc21/run_table_1.sh)."""

_OSS_BIASES = 3 * 2880
"""Elements of the biases of an expert of GPT-OSS (github openai/gpt-oss, torch/model.py)."""

_BRIDGE_MODELS = ("LLAMA3", "Qwen3_30B", "Qwen3_235B", "GPT OSS")
"""Beginnings of the names of models whose configurations in Megatron-Bridge were read."""

_WHOLE_GRAPHS = {
    "GPT OSS 120B": ("GB200", "GB300"),
    "Qwen3_30B_a3B": ("B300", "GB200", "GB300"),
    "Qwen3_235B_a22B": ("GB200", "GB300"),
}
"""Devices on which Megatron-Bridge puts the whole step with MXFP8 into one CUDA graph, and hides
expert exchanges behind compute, since release 26.06."""

_SELECTIVE_DEVICES = ("B200", "GB200", "H100-SXM5-80GB")
"""Devices on which Megatron-Bridge computes norms and activations of GPT-OSS again, in 16 bits."""

_NARROW_GRADIENTS = ("NeMo 24", "NeMo 25", "DGX Cloud", "MLPerf", "fms-fsdp", "Megatron MoE")
"""Beginnings of the names of sources whose configurations sum gradients in 16 bits
(`grad_reduce_in_fp32` of NeMo's recipes, `grad_sync_dtype` of its configurations, `reduce_dtype` of
fms-fsdp's policies, `--grad-reduce-in-bf16` of the Model Zoo)."""


def published_choices(row: Mapping[str, str]) -> PublishedChoices:
    """Returns the choices of a row's run that its published scripts and its software state.

    Megatron-LM hides the exchanges of the backward pass since September 2021 (github
    NVIDIA/Megatron-LM, commit 3f65246911), after arXiv 2104.04473 and before arXiv 2205.05198.
    """
    source, name = row["source"], row["model"]
    if source == "arXiv 2104.04473 table 1":
        return _NARAYANAN.get(name, PublishedChoices())
    if source == "arXiv 2205.05198 table 5":
        return PublishedChoices(software="megatron-2022")
    if source == "llm-foundry MPT":
        # attention `flash` or `triton` of FlashAttention 1 (github mosaicml/llm-foundry,
        # scripts/train/benchmarking/sweep.py of 2023)
        # with `mixed_precision: PURE`, which sums gradients in 16 bits
        return PublishedChoices(software="torch-2023", states="bf16-gradients")
    if source.startswith("KempnerForge"):
        # `model.to(dtype=param_dtype)` of kempnerforge/distributed/parallel.py
        return PublishedChoices(states="bf16")
    if source.startswith("NeMo AutoModel"):
        # `torch_dtype: bf16` with `torch.optim.Adam`, and `fake_balanced_gate: true`
        # (`FakeBalancedGate` of moe/layers.py)
        found = PublishedChoices(states="bf16", balanced_gate=True)
        if name.startswith("GPT-OSS"):  # FlexAttention, and `_apply_bias` of moe/layers.py
            return found._replace(recompute="none", expert_vectors=_OSS_BIASES)
        # `attn: te` and `activation_checkpointing: true` of examples/llm_benchmark/**/*_te_deepep
        return found._replace(recompute="full", software="transformer-engine")
    if source.startswith("MLPerf v5.1, Llama 3.1 8B") and row["device"] not in ("MI355X", "MI325X"):
        # config_common_cg.sh, which NVIDIA's configurations of Llama 3.1 8B read
        return PublishedChoices(states="bf16-gradients", software="megatron-2026")
    if source.startswith("arXiv 2311.05610"):
        # 13B parameters on a device of 80 GB, without tp and pp, only fit with 16 bits.
        return PublishedChoices(states="bf16-gradients")
    if source.startswith(_NARROW_GRADIENTS):
        return PublishedChoices(states="bf16-gradients")
    if source.startswith("torchtitan"):
        return _torchtitan(row)
    if source.startswith("Megatron-Bridge"):
        return _megatron_bridge(source.removeprefix("Megatron-Bridge "), name, row)
    return PublishedChoices()


def _torchtitan(row: Mapping[str, str]) -> PublishedChoices:
    """Returns the choices of torchtitan. A pipeline has as many microbatches as devices in it, if
    the configuration does not state their number (`pipeline_parallel_microbatches`), and an
    interleaved schedule has two groups of layers on each. The configuration of Llama 3 8B computes
    selected operators again (llama3_8b.toml).
    """
    note, stages = row.get("note", ""), int(row["pp"])
    eager = note.startswith("FSDP") and "compile" not in note
    size = int(row["global_batch"]) // (int(row["dp"]) * stages)
    return PublishedChoices(
        micro_batch=size if stages > 1 else None,
        vpp=2 if stages > 1 else None,
        recompute="selective",
        software="torch-eager" if eager else None,
    )


def _megatron_bridge(release: str, name: str, row: Mapping[str, str]) -> PublishedChoices:
    """Returns the choices of Megatron-Bridge (github NVIDIA-NeMo/Megatron-Bridge,
    scripts/performance/configs of v0.2.0 to v0.5.0, src/megatron/bridge/perf_recipes of v0.6.0).

    Nothing is computed again, except norms and activations of GPT-OSS on some devices. Activations
    that do not fit in memory are moved to the host.
    """
    if name.startswith(("DeepSeek", "Kimi")):  # `recompute_modules`: mla_up_proj, moe_act, mlp
        return PublishedChoices(states="bf16-gradients", recompute="selective")
    if not name.startswith(_BRIDGE_MODELS):
        return PublishedChoices(states="bf16-gradients")
    device, wide = row["device"], row["precision"] == "bf16"
    again = name.startswith("GPT OSS") and wide and device in _SELECTIVE_DEVICES
    graph = release >= "26.06" and row.get("note", "").startswith("MXFP8")
    return PublishedChoices(
        recompute="selective" if again else "none",
        states="bf16-gradients",
        software="megatron-2026" if graph and device in _WHOLE_GRAPHS.get(name, ()) else None,
        expert_vectors=_OSS_BIASES if name.startswith("GPT OSS") else 0,
    )
