"""Experts on several hosts: groups of experts, bytes of tokens, and exchanges behind compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.inputs.hugging_face import from_hugging_face
from unisono.planner.step_times.exchange_times import ExchangeTimes, reached_ranks
from unisono.planner.step_times.kernel_times import KernelTimes
from unisono.planner.step_times.step_time import StepModel

CONSTANTS = default_constants().changed(
    straggler=0.0, link_start_s=0.0, link_rank_s=0.0, network_start_s=0.0
)
MODEL = replace(planner.load_model("qwen3-30b-a3b"), layers=8, vocab=1024)
JOB = planner.Workload(seq=4096, global_batch=64, micro_batch=1, recompute="none")
CLUSTER = planner.Cluster(device="h100", devices=16)


@pytest.mark.parametrize(
    ("ranks", "copies", "groups", "limit"),
    [(8, 8, 8, 4), (4, 8, 8, 3), (2, 3, 8, 2), (16, 8, 8, 4), (64, 6, 8, 1), (8, 4, 1, 1)],
)
def test_ranks_of_a_limited_router(ranks: int, copies: int, groups: int, limit: int) -> None:
    """Counts the ranks of tokens that choose random experts of random groups."""
    random, experts = np.random.default_rng(0), 128
    counts = []
    for _ in range(10_000):
        chosen = random.permutation(groups)[:limit]
        size = experts // groups
        picks = random.choice(chosen, copies) * size + random.integers(size, size=copies)
        counts.append(len(set(picks * ranks // experts)))
    assert reached_ranks(ranks, copies, groups, limit) == pytest.approx(np.mean(counts), rel=0.02)


def test_a_limited_router_sends_to_fewer_hosts() -> None:
    """Compares the time of an exchange among 8 hosts with the bytes that leave a host."""
    cluster = planner.Cluster(device="h100", devices=64)
    exchanges = ExchangeTimes(cluster, CONSTANTS)
    place, rate = exchanges.place(64, 1), cluster.between_Bps * CONSTANTS.exchange_share
    free, limited = (
        exchanges.route_s(1e8, 8, place, groups=8, limit=limit) * rate / 1e8 for limit in (8, 4)
    )
    assert free == pytest.approx(7 / 8 * 8 * (1 - (7 / 8) ** 8))
    assert limited == pytest.approx(7 / 8 * 4 * (1 - (3 / 4) ** 8))


def test_groups_of_a_configuration() -> None:
    config = {
        "model_type": "deepseek_v3", "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "intermediate_size": 128, "num_hidden_layers": 4, "hidden_size": 64,
        "num_attention_heads": 4, "vocab_size": 100,
        "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
        "n_group": 8, "topk_group": 4,
    }  # fmt: skip
    found = from_hugging_face(config)
    assert (found.expert_groups, found.token_groups) == (8, 4)
    assert from_hugging_face({**config, "n_group": 1, "topk_group": 1}).expert_groups == 0
    with pytest.raises(ValueError, match="token_groups must be between 1 and the 8 groups"):
        replace(found, token_groups=9)


@pytest.mark.parametrize(("experts", "gaps"), [(8, 0.0), (16, 1 / 2), (128, 15 / 16)])
def test_products_of_experts(experts: int, gaps: float) -> None:
    """Tests that one expert on a device is as fast as a dense product, and that n experts lose
    the time of n - 1 gaps.
    """
    model = replace(MODEL, experts=experts, top_k=1)
    cluster = planner.Cluster(device="h100", devices=8)
    constants = CONSTANTS.changed(memory_share=1e3)  # FLOPs limit all products
    times = StepModel(model, cluster, JOB, constants)
    shape = times.shape(planner.Layout(dp=8, ep=8), 1, experts=True)
    found = {each.name: each for each in times.layers.operators(shape)}["experts out"]
    kernels = KernelTimes(cluster.kind, constants, precision="bf16")
    rows, local = 4096 * 8 / experts, experts / 8
    dense_s = kernels.product_s(rows, model.hidden, model.expert_ffn, local) - kernels.start_s
    loss = 1 + (1 / CONSTANTS.grouped_products("hopper", "bf16") - 1) * gaps
    assert found.forward_s - kernels.start_s == pytest.approx(dense_s * loss)


def test_biases_of_experts_are_kernels_of_their_own() -> None:
    """Tests the bytes: 28 for each output of a routed token, and 16 for each input of a limited
    activation; one CUDA graph has fused kernels.
    """
    biased = replace(MODEL, expert_vectors=3 * MODEL.expert_ffn)
    times = StepModel(biased, CLUSTER, JOB, CONSTANTS)
    shape = times.shape(planner.Layout(dp=16, ep=16), 1, experts=True)
    found = {each.name: each for each in times.layers.operators(shape)}
    values = 28 * MODEL.hidden + 16 * MODEL.expert_ffn
    assert found["expert biases"].nbytes == shape.tokens * MODEL.top_k * values
    graph = times.layers.operators(shape._replace(software="megatron-2026"))
    assert "expert biases" not in {each.name for each in graph}


def expert_s(software: str | None, **changes: float) -> Mapping[str, float]:
    layout = planner.Layout(dp=16, ep=16, zero=1)
    job = replace(JOB, software=software)
    constants = CONSTANTS.changed(**changes)
    return planner.predict(MODEL, CLUSTER, layout, job, constants=constants).time


def test_software_of_2025_hides_exchanges_but_not_the_host() -> None:
    old, new = (
        expert_s(name, overlap_slowdown=0.25, network_share=1.0)
        for name in ("transformer-engine", "megatron-2025")
    )
    assert new["expert"] == pytest.approx(0.25 * old["expert"]) and old["expert"] > 0
    assert new["host"] >= old["host"] > 0
    slow = {"exchange_share": 0.001, "overlap_slowdown": 0.0}
    whole, exposed = (expert_s(name, **slow) for name in ("transformer-engine", "megatron-2025"))
    compute = ("matmul", "attention", "memory")
    hidden_s = sum(whole[kind] for kind in compute)
    assert exposed["expert"] == pytest.approx(whole["expert"] - hidden_s, rel=1e-6)


def test_tokens_of_eight_bits() -> None:
    """Tests that DualPipe with fp8 sends inputs of experts in 8 bits, and outputs in 16."""
    layout = planner.Layout(dp=4, pp=2, ep=4, vpp=2, schedule="dualpipev")
    cluster = planner.Cluster(device="h100", devices=8, per_host=1)
    constants = CONSTANTS.changed(overlap_slowdown=1.0, exchange_share=0.01)
    wide, narrow = (
        planner.predict(
            MODEL, cluster, layout, replace(JOB, precision=precision), constants=constants
        ).time["expert"]
        for precision in ("bf16", "fp8")
    )
    assert narrow == pytest.approx(3 / 4 * wide)
