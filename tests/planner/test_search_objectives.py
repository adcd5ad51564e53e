"""Objectives, limits and the Pareto front of the search, compared with a trial of all layouts. Any
executor may run the search.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from unisono import planner
from unisono.planner.layout_search.search import OBJECTIVES, smaller_clusters

MODEL = planner.load_model("gpt3-1.7b")
JOB = planner.Workload(seq=2048, global_batch=16)
CLUSTER = planner.Cluster.parse("a100:8")
SLOW = planner.Cluster(device="a100", devices=8, per_host=2, network_Bps=3e8)
"""A cluster on which fewer devices are often faster."""


@pytest.fixture(scope="module", params=[CLUSTER, SLOW], ids=["fast", "slow network"])
def cluster(request: pytest.FixtureRequest) -> planner.Cluster:
    found: planner.Cluster = request.param
    return found


@pytest.fixture(scope="module")
def every(cluster: planner.Cluster) -> list[planner.Prediction]:
    """Returns the predictions of all layouts that fit on 8, 4, 2 and 1 devices."""
    found: list[planner.Prediction] = []
    for part in smaller_clusters(cluster):
        candidates = planner.search(MODEL, part, JOB, keep=10**6)
        found += [each.prediction for each in candidates]
    return found


def key_of(objective: str, step: planner.Prediction) -> tuple[float, ...]:
    return {
        "time": (step.step_s,),
        "cost": (step.step_s * step.layout.devices,),
        "devices": (step.layout.devices, step.step_s),
        "memory": (step.memory_bytes, step.step_s),
    }[objective]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("longest_s", [None, 3.0])
def test_the_best_of_everything(
    every: list[planner.Prediction],
    cluster: planner.Cluster,
    objective: str,
    longest_s: float | None,
) -> None:
    allowed = [
        each
        for each in every
        if longest_s is None or each.step_s <= longest_s
        if objective in ("cost", "devices") or each.layout.devices == cluster.devices
    ]
    expected = sorted(key_of(objective, each) for each in allowed)[:7]
    found = planner.search(MODEL, cluster, JOB, keep=7, objective=objective, longest_s=longest_s)
    for each, key in zip(found, expected, strict=True):
        assert key_of(objective, each.prediction) == pytest.approx(key, rel=1e-9, abs=1)
        assert each.prediction.fits
    counts = found.counts
    assert counts.considered == counts.too_large + counts.bounded + counts.predicted
    with ThreadPoolExecutor(2) as pool:
        divided = planner.search(
            MODEL, cluster, JOB, keep=7, objective=objective, longest_s=longest_s, executor=pool
        )
    assert divided.entries == found.entries
    assert divided.counts.considered == counts.considered


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_limit_that_nothing_meets(
    every: list[planner.Prediction], cluster: planner.Cluster, objective: str
) -> None:
    """Tests that the message names the shortest step of all layouts that were considered."""
    parts = objective in ("cost", "devices")
    considered = [step for step in every if parts or step.layout.devices == cluster.devices]
    shortest = min(considered, key=lambda step: step.step_s)
    text = f"no step takes 0.001 s or less; the shortest takes {shortest.step_s:.4g} s ("
    with pytest.raises(ValueError, match=re.escape(text)):
        planner.search(MODEL, cluster, JOB, objective=objective, longest_s=0.001)


def test_nothing_fits_at_any_time() -> None:
    small = planner.Cluster(device="a100", devices=1)
    for longest_s in (None, 0.001):
        with pytest.raises(ValueError, match=r"nothing fits: .* more devices or a smaller model"):
            planner.search("gpt3-175b", small, JOB, longest_s=longest_s)


def test_objectives_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="objective must be one of time, cost"):
        planner.search(MODEL, CLUSTER, JOB, objective="joy")


def test_front_is_what_nothing_beats(
    every: list[planner.Prediction], cluster: planner.Cluster
) -> None:
    points = np.array([[each.layout.devices, each.memory_bytes, each.step_s] for each in every])
    expected = set()
    for point in points:
        no_worse = np.all(points <= point, axis=1)
        if not np.any(no_worse & np.any(points < point, axis=1)):
            expected.add(tuple(point))
    with ThreadPoolExecutor(2) as pool:
        for executor in (None, pool):
            front = planner.pareto_front(MODEL, cluster, JOB, executor=executor)
            found = [(each.layout.devices, each.memory_bytes, each.step_s) for each in front]
            assert len(found) == len(set(found)) and set(found) == expected


def test_front_with_a_tolerance(cluster: planner.Cluster) -> None:
    """Tests that a tolerance shortens the Pareto front. For each layout of the whole front, the
    short front must have one that is at most slightly worse.
    """
    whole = planner.pareto_front(MODEL, cluster, JOB)
    few = planner.pareto_front(MODEL, cluster, JOB, tolerance=0.1)
    assert len(few) < len(whole)
    capacity = whole[0].capacity_bytes
    for each in whole:
        assert any(
            near.layout.devices <= each.layout.devices
            and near.step_s * 0.9 <= each.step_s
            and near.memory_bytes <= each.memory_bytes + 0.1 * capacity
            for near in few
        )


def test_front_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    front = planner.pareto_front(MODEL, CLUSTER, JOB, tolerance=0.1)
    for name, start in (("front.png", b"\x89PNG"), ("front.svg", b"<?xml")):
        planner.save_front_plot(front, tmp_path / name, title="front")
        assert (tmp_path / name).read_bytes().startswith(start)


def test_scaling_curve() -> None:
    curve = planner.scaling_curve(MODEL, CLUSTER, JOB)
    assert [point.devices for point in curve] == [1, 2, 4, 8]
    for point in curve:
        cluster = planner.Cluster.parse(f"a100:{point.devices}:8")
        best = planner.search(MODEL, cluster, JOB, keep=1)[0].prediction
        assert point.prediction.step_s == best.step_s
        assert point.speedup == pytest.approx(curve[0].prediction.step_s / best.step_s)
        assert point.scale_factor == pytest.approx(point.speedup / point.devices)


def test_weak_scaling_grows_the_batch() -> None:
    job = planner.Workload(seq=2048, global_batch=12)
    curve = planner.scaling_curve(MODEL, CLUSTER, job, weak=True)
    batches = {point.devices: point.prediction.job.global_batch for point in curve}
    # one device is left out, since its batch would be 12 / 8 = 1.5 sequences
    assert batches == {2: 3, 4: 6, 8: 12}
    assert curve[-1].scale_factor == pytest.approx(curve[-1].speedup / 4)


def test_scaling_of_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="nothing fits on 1, 2, 4, 8 devices"):
        planner.scaling_curve(planner.load_model("gpt3-530b"), CLUSTER, JOB)
    large = planner.scaling_curve(planner.load_model("gpt3-22b"), CLUSTER, JOB)
    assert large[0].devices > 1
