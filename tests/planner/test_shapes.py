"""Models, devices, clusters, layouts and workloads: sizes, names, files and refused values."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono import planner
from unisono.planner.inputs.devices import device_named

# Rows of table 1 of arXiv 2104.04473: printed size in billions, layers, hidden size, heads.
NARAYANAN = [
    (1.7, 24, 2304, 24),
    (3.6, 30, 3072, 32),
    (7.5, 36, 4096, 32),
    (18.4, 40, 6144, 48),
    (39.1, 48, 8192, 64),
    (76.1, 60, 10240, 80),
    (145.6, 80, 12288, 96),
    (310.1, 96, 16384, 128),
    (529.6, 105, 20480, 128),
    (1008.0, 128, 25600, 160),
]


@pytest.mark.parametrize(("billions", "layers", "hidden", "heads"), NARAYANAN)
def test_parameters_of_gpt(billions: float, layers: int, hidden: int, heads: int) -> None:
    vocab, seq = 51200, 2048
    model = planner.Transformer(
        layers=layers, hidden=hidden, heads=heads, vocab=vocab, positions=seq
    )
    formula = 12 * layers * hidden**2
    formula *= 1 + 13 / (12 * hidden) + (vocab + seq) / (12 * layers * hidden)
    last_norm = 2 * hidden  # the formula omits the parameters of the last norm layer
    assert model.parameters == pytest.approx(formula + last_norm, rel=1e-12)
    assert round(model.parameters / 1e9, 1) == billions


# Published numbers of parameters, from GPT-2 and the model cards of the other models.
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("llama2-7b", 6_738_415_616),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_published_parameter_counts(name: str, parameters: int) -> None:
    assert planner.load_model(name).parameters == parameters


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("deepseek-v3", 671, 37), ("qwen3-30b-a3b", 30.5, 3.3), ("qwen3-235b-a22b", 235, 22)],
)
def test_published_sizes_of_experts(name: str, total: float, active: float) -> None:
    model = planner.load_model(name)
    assert model.parameters / 1e9 == pytest.approx(total, rel=0.01)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.04)


def refusals() -> list[tuple[object, str]]:
    gpt = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100}
    return [
        (lambda: planner.Transformer(**{**gpt, "layers": 0}), "layers must be at least 1, not 0"),
        (lambda: planner.Transformer(**gpt, kv_heads=3), "3 does not divide 4; 2 does"),
        (lambda: planner.Transformer(**gpt, experts=4, top_k=5, expert_ffn=8), "not 5"),
        (lambda: planner.Transformer(**gpt, experts=4, top_k=2), "needs expert_ffn"),
        (lambda: planner.load_model("/tmp"), "near: gpt2-1.5b, gpt3-1.7b"),
        (lambda: planner.Layout(dp=0), "dp must be at least 1, not 0"),
        (lambda: planner.Layout(zero=4), "zero must be 0, 1, 2 or 3, not 4"),
        (lambda: planner.Layout(schedule="2f2b"), "schedule must be one of 1f1b"),
        (lambda: planner.Layout(dp=4, ep=3), "3 does not divide 4 x 1 x 1 = 4; 2 does"),
        (lambda: planner.Layout(dp=6, dp_replicate=4), "4 does not divide 6; 3 does"),
        (lambda: planner.Workload(seq=0, global_batch=1), "seq must be at least 1, not 0"),
        (lambda: planner.Workload(seq=1, global_batch=4, micro_batch=5), "not 5"),
        (lambda: planner.Workload(seq=1, global_batch=1, precision="fp7"), "not 'fp7'"),
        (lambda: planner.Cluster(device="A1000", devices=8), "near: A100"),
        (lambda: planner.Cluster(device="a100", devices=0), "devices must be at least 1"),
        (lambda: planner.Cluster.parse("a100"), "such as a100:1024"),
        (lambda: device_named("v100").peak_of("fp8"), "V100-SXM2-32GB has no fp8"),
    ]


@pytest.mark.parametrize("number", range(len(refusals())))
def test_refusals_name_the_numbers(number: int) -> None:
    make, text = refusals()[number]
    with pytest.raises(ValueError, match=re.escape(text)):
        make()  # type: ignore[operator]


GPT = planner.Transformer(layers=12, hidden=768, heads=12, vocab=50304)


@pytest.mark.parametrize(
    ("layout", "batch", "text"),
    [
        (planner.Layout(dp=4), 8, "4 x 1 x 1 x 1 = 4, but the cluster has 8 devices; dp = 8 uses"),
        (planner.Layout(tp=8), 8, "tp must divide the heads: 8 does not divide 12; 6 does"),
        (planner.Layout(dp=8), 12, "12 is not one of 8 x 1 = 8; 16 is"),
        (planner.Layout(dp=8, ep=2), 8, "ep = 2 needs a model with experts; ep = 1 works"),
        (planner.Layout(dp=8, vpp=2), 8, "vpp = 2 needs pp over 1; vpp = 1 works"),
        (planner.Layout(pp=8, vpp=2), 8, "12 layers cannot fill pp x vpp = 8 x 2 = 16"),
        (planner.Layout(dp=2, pp=4, schedule="zbv"), 8, "zbv has vpp = 2, not 1"),
        (planner.Layout(dp=2, pp=4, schedule="interleaved"), 8, "needs vpp over 1"),
    ],
)
def test_layouts_that_cannot_train_the_model(layout: planner.Layout, batch: int, text: str) -> None:
    cluster = planner.Cluster(device="a100", devices=8)
    with pytest.raises(ValueError, match=re.escape(text)):
        planner.predict(GPT, cluster, layout, planner.Workload(seq=1024, global_batch=batch))


@given(
    dp=st.integers(1, 64),
    tp=st.integers(1, 8),
    pp=st.integers(1, 8),
    vpp=st.none() | st.integers(1, 4),
    zero=st.integers(0, 3),
    sequence_parallel=st.booleans(),
)
def test_layout_files_keep_everything(tmp_path_factory: pytest.TempPathFactory, **sizes) -> None:  # type: ignore[no-untyped-def]
    layout = planner.Layout(**sizes)
    path = tmp_path_factory.mktemp("layouts") / "layout.json"
    layout.save(path)
    assert planner.Layout.load(path) == layout
    assert layout.devices == sizes["dp"] * sizes["tp"] * sizes["pp"]


def test_layout_files_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    for text, message in (
        ('{"dq": 1}', "unknown fields dq"),
        ("[1]", "not list"),
        ("{", "layout.json"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            planner.Layout.load(path)


def test_own_devices_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    device = {"like": "H100-SXM5-80GB", "name": "H100 with 100 Gbit/s", "network_Bps": 12.5e9}
    path.write_text(json.dumps({"device": device, "devices": 64}))
    cluster = planner.Cluster.load(path)
    assert (cluster.domain, cluster.hosts, cluster.between_Bps) == (8, 8, 12.5e9)
    assert cluster.kind.peak_of("bf16") == device_named("h100").peak_of("bf16")
    path.write_text(json.dumps({"device": {**device, "speed": 1}, "devices": 64}))
    with pytest.raises(ValueError, match="unknown fields of a device: speed"):
        planner.Cluster.load(path)


def test_every_device_has_a_source() -> None:
    names = {device.name for device in planner.catalogue()}
    wanted = "V100-SXM2-32GB A100-SXM4-40GB A100-SXM4-80GB H100-SXM5-80GB H100-SXM5-96GB-HBM2e "
    wanted += "H200-SXM5-141GB B200 B300 GB200 GB300 MI300X Ascend-910B"
    assert set(wanted.split()) <= names
    assert all(len(device.source) > 10 for device in planner.catalogue())
    assert device_named("Ascend 910B").name == "Ascend-910B"


def test_this_machine_is_a_device() -> None:
    device = device_named("CPU")
    assert device.peak_of("fp32") > 1e8 and device.memory_Bps > 1e8
    assert device_named("cpu") is device
