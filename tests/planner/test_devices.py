"""Devices: names, precisions, numbers of data sheets, and processors that devices share."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from unisono import planner

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
        (" H100 ", "H100-SXM5-80GB"),
        ("H100 SXM", "H100-SXM5-80GB"),
        ("h100-sxm5-80gb\n", "H100-SXM5-80GB"),
        ("ascend_910b", "Ascend-910B"),
    ],
)
def test_names(name: str, device: str) -> None:
    assert planner.device_named(name).name == device
    assert planner.Cluster.parse(f"{name}:16").kind.name == device


def test_every_name_means_one_device() -> None:
    for device in planner.catalogue():
        for name in (device.name, *device.aliases):
            assert planner.device_named(name) == device


@pytest.mark.parametrize("device", planner.catalogue(), ids=lambda device: str(device.name))
def test_rates_of_tensor_cores(device: planner.Device) -> None:
    """Tests the ratios of the rates that all architectures since Ampere have: half for twice the
    bits. Sparse rates in place of dense ones would break them.
    """
    if "bf16" not in device.peak or device.architecture == "davinci":
        return
    wide = device.peak["bf16"]
    assert device.peak["fp16"] == wide
    for precision, factor in (("tf32", 0.5), ("fp8", 2), ("fp4", 4)):
        rate = device.peak.get(precision)
        # B300 and GB300 have a higher rate of fp4 only.
        if rate is not None and "300" not in device.name:
            assert rate == pytest.approx(factor * wide, rel=0.02)


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
    least_s = planner.step_flops(MODEL, seq=1024, batch=8) / 1e12
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
    whole = planner.device_named("CPU")
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
