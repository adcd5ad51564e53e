"""Numbers of the catalogue and of the known models: their places, and relations of physics."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch

import pytest

from unisono import planner
from unisono.planner.data_files import data_text

ENTRIES = {entry["name"]: entry for entry in json.loads(data_text("devices.json"))["devices"]}
EACH_DEVICE = pytest.mark.parametrize("device", planner.catalogue(), ids=lambda each: each.name)

# FLOPs of one unit in one cycle of a dense product with sums in float32, in the widest format of 16
# bits. The data sheets of the architectures state them.
FLOPS_PER_CYCLE = {
    "volta": 1024,
    "turing": 1024,
    "ampere": 2048,
    "ada": 1024,
    "hopper": 4096,
    "blackwell": 8192,
    "cdna2": 1024,
    "cdna3": 2048,
    "davinci": 8192,
    "tpu": 2 * 128**2,
    "gaudi": 2 * 128**2,
    # GA102 has half of the rate of GA100. GeForce, and A10G, have half of the rate of their die.
    "RTX-A6000": 1024,
    "A10G": 512,
    "RTX-4090": 512,
    "RTX-5090": 512,
    "MI355X": 4096,
    "MI350X": 4096,
}
# H20: its rate is limited for export. TPU-v6e: 918 TFLOP/s need 3.5 GHz of the documented units.
OTHER_CLOCKS = {"H20-SXM5-96GB", "TPU-v6e"}


def places(source: str) -> dict[str, str]:
    """Returns the place of each field that a source names."""
    groups = [group.partition(": ") for group in source.split("; ")]
    return {field: place for fields, _, place in groups for field in fields.split(", ")}


@EACH_DEVICE
def test_each_number_has_a_place(device: planner.Device) -> None:
    found = places(device.source)
    assert all(found.values()), device.source
    stated = set(ENTRIES[device.name]) - {"name", "aliases", "architecture", "source"}
    assert set(found) - {"architecture"} == stated


@EACH_DEVICE
def test_rates_of_tensor_cores(device: planner.Device) -> None:
    """Tests the ratios of the rates that all architectures since Ampere have: half for twice the
    bits. Sparse rates in place of dense ones would break them.
    """
    if "bf16" not in device.peak or device.architecture in ("davinci", "gaudi", "tpu"):
        return
    wide = device.peak["bf16"]
    assert device.peak["fp16"] == wide
    higher_fp4 = device.name in ("B300", "GB300")
    for precision, factor in (("tf32", 0.5), ("fp8", 2), ("fp4", 6 if higher_fp4 else 4)):
        rate = device.peak.get(precision)
        if rate is not None:
            assert rate == pytest.approx(factor * wide, rel=0.02), precision


@EACH_DEVICE
def test_clock_of_the_peak_rate(device: planner.Device) -> None:
    """Tests that units x FLOPs per cycle need a clock that devices have. Sparse rates, or half of
    the units, would need twice of it.
    """
    if device.name in OTHER_CLOCKS:
        return
    per_cycle = FLOPS_PER_CYCLE.get(device.name, FLOPS_PER_CYCLE[device.architecture])
    wide = device.peak.get("bf16", device.peak.get("fp16", 0.0))
    assert 1.35e9 < wide / (device.units * per_cycle) < 2.55e9


@EACH_DEVICE
def test_memory_sizes(device: planner.Device) -> None:
    """Tests that sizes are whole GiB, or the MiB that the source states."""
    stated = re.search(r"\b([\d,]+) MiB", places(device.source)["memory_bytes"])
    mib = device.memory_bytes / 2**20
    if mib % 1024:
        assert stated is not None and float(stated[1].replace(",", "")) == mib
    elif stated is not None:
        assert float(stated[1].replace(",", "")) == pytest.approx(mib, rel=0.01)


@EACH_DEVICE
def test_order_of_rates(device: planner.Device) -> None:
    """Tests that memory is faster than links, and that links are faster than the network."""
    assert device.memory_Bps > device.link_Bps > device.network_Bps
    narrow = device.peak.get("fp32")
    assert narrow is None or narrow <= min(device.peak.values())


def test_each_model_has_a_place() -> None:
    document = json.loads(data_text("models.json"))
    for name in document["models"]:
        own = [text for each, text in document["sources"].items() if fnmatch(name, each)]
        assert len(own) == 1 and own[0], name
    for each in document["sources"]:
        assert any(fnmatch(name, each) for name in document["models"]), each
