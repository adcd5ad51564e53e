"""`unisono train` with a layout: launched ranks, real data, and reported figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from unisono import planner
from unisono.pipeline import PipelineSchedule
from unisono.planner import Layout
from unisono.train import LayoutRun, Stepped, launch_layout
from unisono.train.layout_settings import SHAPES

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("forked_agent")]


def a_run(task: Any, layout: str, **changes: Any) -> LayoutRun:
    parsed = Layout.parse(layout)
    run = LayoutRun(
        task=task,
        ranks=parsed.devices,
        layout=parsed,
        steps=2,
        batch=4,
        microbatches=1,
        learning_rate=1e-2,
        clip=1.0,
        seed=3,
        dtype="float64",
    )
    return replace(run, **changes)


def train(run: LayoutRun) -> dict[str, Any]:
    heard: list[object] = []
    found: dict[str, Any] = launch_layout(run, heard.append)
    assert [each.loss for each in heard if isinstance(each, Stepped)] == found["losses"]
    return found


def test_experts_train_alike_and_continue_in_another_layout(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    random = {"dropout": 0.1, "capacity_factor": 0.8}
    alone = train(a_run("moe", "dp=1", steps=4, **random))
    first = train(a_run("moe", "tp=2,pp=2,ep=2", microbatches=2, save=folder, **random))
    rest = train(a_run("moe", "dp=2,ep=2,zero=1", load=folder, **random))
    assert first["losses"] + rest["losses"] == pytest.approx(alone["losses"], rel=1e-12)
    assert first["grad_norms"] == pytest.approx(alone["grad_norms"][:2], rel=1e-10)
    assert first["parameters"] == alone["parameters"]
    assert all(len(ranks) == 4 and max(ranks) > 0 for ranks in first["bytes_sent"].values())
    assert len(first["peak_bytes"]) == 4


def test_a_saved_plan_trains(tmp_path: Path) -> None:
    job = planner.Workload(seq=SHAPES["text"].positions, global_batch=4)
    found = planner.search(SHAPES["text"], planner.Cluster.parse("a100:2"), job)
    path = tmp_path / "layout.json"
    next(iter(found)).layout.save(path)
    layout = Layout.read(str(path))
    run = replace(a_run("text", "dp=2"), layout=layout)
    losses = train(run)["losses"]
    assert len(losses) == 2


def test_what_cannot_be_is_refused_with_what_works() -> None:
    shape = replace(SHAPES["moe"], experts=7)
    with pytest.raises(ValueError, match=r"^ep must divide .* 2 does not divide 7; 1 does$"):
        train(a_run("moe", "dp=2,ep=2", shape=shape))
    with pytest.raises(
        ValueError, match=r"tensor = 2d needs the modules of TransformerModel; .* 1d"
    ):
        train(a_run("digits", "tp=4,tensor=2d"))
    with pytest.raises(ValueError, match="there are 4 ranks; dp = 2 uses 4"):
        a_run("text", "tp=2", ranks=4)
    with pytest.raises(ValueError, match="there are 4 ranks; dp = 1 works with 8 ranks"):
        a_run("text", "tp=8", ranks=4)


@pytest.mark.parametrize(
    ("layout", "microbatches"), [("dp=2,zero=3", 1), ("pp=2,vpp=2,schedule=zbv", 4)]
)
def test_a_forecast_changes_no_training(layout: str, microbatches: int) -> None:
    changes = {"batch": 8, "microbatches": microbatches}
    run = a_run("text", layout, **changes)
    found = train(replace(run, predicts=True))
    again = train(replace(run, tells_schedule="pp=2" in layout))
    assert found["losses"] == again["losses"]
    if "pp=2" in layout:
        schedule = PipelineSchedule.from_document(again["schedule"])
        assert schedule.name == "zbv" and schedule.microbatches == microbatches
    predicted = found["predicted"]
    parts = predicted["step_parts"]
    assert set(parts) == {"layers_s", "ends_s", "waits_s", "update_s"}
    assert sum(parts.values()) == pytest.approx(predicted["step_s"])
    assert parts["layers_s"] > 0
    assert ("pp=2" in layout) == (parts["update_s"] > 0)


def test_a_forecast_of_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--predict: expected a model of equal layers .* digits$"):
        train(a_run("digits", "dp=2", predicts=True))
