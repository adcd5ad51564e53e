"""Devices: names, precisions, links, and processors that devices share."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from unisono import planner
from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.inputs.devices import device_named
from unisono.planner.inputs.training_flops import step_flops
from unisono.planner.step_times.exchange_times import ExchangeTimes

MODEL = planner.load_model("gpt3-1.7b")


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA H100 NVL", "H100-NVL-94GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("NVIDIA H200", "H200-SXM5-141GB"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H20", "H20-SXM5-96GB"),
        ("NVIDIA H800", "H800-SXM5-80GB"),
        ("NVIDIA A800-SXM4-80GB", "A800-SXM4-80GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("AMD Instinct MI325X", "MI325X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI250X", "MI250X"),
        ("AMD Instinct MI350X", "MI350X"),
        ("TPU v5e", "TPU-v5e"),
        ("Intel Gaudi 3", "Gaudi-3"),
        ("ascend_910c", "Ascend-910C"),
        (" H100 ", "H100-SXM5-80GB"),
        ("H100 SXM", "H100-SXM5-80GB"),
        ("h100-sxm5-80gb\n", "H100-SXM5-80GB"),
        ("ascend_910b", "Ascend-910B"),
    ],
)
def test_names(name: str, device: str) -> None:
    assert device_named(name).name == device
    assert planner.Cluster.parse(f"{name}:16").kind.name == device


def test_every_name_means_one_device() -> None:
    for device in planner.catalogue():
        for name in (device.name, *device.aliases):
            assert device_named(name) == device


@pytest.mark.parametrize(
    ("device", "precision", "text"),
    [
        ("v100", "bf16", "V100-SXM2-32GB has no bf16; it has fp32, fp16; precision fp16 works"),
        ("v100", "tf32", "V100-SXM2-32GB has no tf32; it has fp32, fp16; precision fp32 works"),
        ("910b", "tf32", "Ascend-910B has no tf32; it has fp32, fp16, bf16; precision fp32"),
        ("CPU", "tf32", "CPU has no tf32; it has fp32; precision fp32 works"),
        ("CPU", "fp8", "CPU has no fp8; it has fp32; precision fp32 works"),
        ("CPU", "bf16", "CPU has no bf16; it has fp32; precision fp32 works"),
        ("mi355x", "tf32", "MI355X has no tf32; it has fp32, fp16, bf16, fp8; precision fp32"),
        ("a100", "fp8", "A100-SXM4-80GB has no fp8; it has fp32, tf32, fp16, bf16; precision bf16"),
        ("h100", "fp4", "precision fp8 works"),
    ],
)
def test_precisions_that_a_device_lacks(device: str, precision: str, text: str) -> None:
    job = planner.Workload(seq=128, global_batch=8, precision=precision)
    cluster = planner.Cluster(device=device, devices=8)
    with pytest.raises(ValueError, match=re.escape(text)):
        planner.predict(MODEL, cluster, planner.Layout(dp=8), job)


def exchanges(device: planner.Device | str, devices: int = 8) -> ExchangeTimes:
    """Returns exchanges whose times are their bytes over the rate."""
    constants = default_constants().changed(link_share=1.0, link_start_s=0.0, link_rank_s=0.0)
    return ExchangeTimes(planner.Cluster(device=device, devices=devices), constants)


def test_cards_without_peer_access_copy_through_host_memory() -> None:
    """Tests that a ring of GeForce cards has half the rate of PCIe, that cards with peer access
    have the whole rate, and that a stated rate is used as it is.
    """
    half, whole = exchanges("4090"), exchanges("6000-ada")
    group = half.place(8, 1)
    assert half.gather_s(8e9, group) == pytest.approx(7 / 8 * 8e9 / 16e9)
    assert whole.gather_s(8e9, group) == pytest.approx(7 / 8 * 8e9 / 32e9)
    assert planner.Cluster(device="4090", devices=8, link_Bps=11e9).domain_Bps == 11e9


def test_cards_of_a_switch_share_its_link() -> None:
    """Compares with messages that are counted link by link: 8 cards on two switches of 4."""
    found = exchanges("a100-pcie")
    rate = device_named("a100-pcie").link_Bps

    def slowest(pairs: list[tuple[int, int]], nbytes: float) -> float:
        uplinks = [sum(a // 4 == side != b // 4 for a, b in pairs) for side in (0, 1)]
        cards = [sum(a == card for a, _ in pairs) for card in range(8)]
        return nbytes * max(*uplinks, *cards) / rate

    for ranks, stride in ((8, 1), (4, 1), (2, 4), (4, 2)):
        span = ranks * stride
        groups = [
            range(start + first, start + span, stride)
            for start in range(0, 8, span)
            for first in range(stride)
        ]
        pairs = [(each[i], each[(i + 1) % ranks]) for each in groups for i in range(ranks)]
        place, nbytes = found.place(ranks, stride), 8e9
        expected = slowest(pairs, nbytes * (ranks - 1) / ranks)
        assert found.gather_s(nbytes, place) == pytest.approx(expected), (ranks, stride)
        pairs = [(a, b) for each in groups for a in each for b in each if a != b]
        expected = slowest(pairs, nbytes / (ranks - 1))
        assert found.all_to_all_s(nbytes, place) == pytest.approx(expected), (ranks, stride)
    assert found.send_s(1e9, 4) == pytest.approx(slowest([(i, (i + 4) % 8) for i in range(8)], 1e9))


def test_nvlink_is_not_shared() -> None:
    found = exchanges("a100")
    assert found.all_to_all_s(8e9, found.place(8, 1)) == pytest.approx(8e9 / 300e9)
    assert found.gather_s(8e9, found.place(2, 4)) == pytest.approx(4e9 / 300e9)


def processor(devices: int, per_host: int | None = None) -> planner.Prediction:
    """Returns a prediction on a processor of 8 cores whose exchanges take almost no time."""
    device = planner.Device(
        name="processor",
        architecture="cpu",
        peak={"fp32": 1e12},
        memory_bytes=2**36,
        memory_Bps=1e11,
        link_Bps=1e15,
        network_Bps=1e15,
        units=8,
    )
    per_host = devices if per_host is None else per_host
    cluster = planner.Cluster(device=device, devices=devices, per_host=per_host)
    job = planner.Workload(
        seq=1024, global_batch=8, micro_batch=1, precision="fp32", recompute="none"
    )
    return planner.predict(MODEL, cluster, planner.Layout(dp=devices), job)


def test_devices_of_one_machine_share_its_processor() -> None:
    """Tests that no number of devices on the same cores takes less time than the FLOPs at the rate
    of all cores, or has more memory together, but that two machines halve the products' time.
    """
    one, two, four = processor(1), processor(2), processor(4)
    least_s = step_flops(MODEL, seq=1024, batch=8) / 1e12
    assert min(one.step_s, two.step_s, four.step_s) > least_s
    products = [each.time["matmul"] for each in (one, two, four)]
    assert products[1] == pytest.approx(products[0], rel=0.05)
    assert products[2] == pytest.approx(products[0], rel=0.05)
    assert four.capacity_bytes * 4 == pytest.approx(one.capacity_bytes, rel=1e-6)
    assert four.mfu == pytest.approx(one.mfu * one.step_s / four.step_s, rel=1e-6)
    machines = processor(4, per_host=2)
    assert machines.time["matmul"] == pytest.approx(products[1] / 2, rel=0.01)
    assert machines.capacity_bytes * 2 == pytest.approx(one.capacity_bytes, rel=1e-6)


def test_all_devices_of_this_processor_are_on_one_machine() -> None:
    whole = device_named("CPU")
    cluster = planner.Cluster(device="CPU", devices=4)
    assert cluster.hosts == 1 and cluster.kind.peak["fp32"] == whole.peak["fp32"] / 4
    assert replace(cluster, devices=2).kind.memory_bytes == whole.memory_bytes // 2
    assert cluster.stated_device == whole


def test_sensitivity_changes_the_whole_processor() -> None:
    """Tests that the sensitivity of shared processors starts from the same step."""
    cluster = processor(4).cluster
    job = planner.Workload(
        seq=1024, global_batch=8, micro_batch=1, precision="fp32", recompute="none"
    )
    rows = planner.sensitivity(MODEL, cluster, planner.Layout(dp=4), job)
    assert sum(row.elasticity for row in rows) == pytest.approx(1, abs=0.05)
    assert all(row.saved > -0.01 for row in rows)
