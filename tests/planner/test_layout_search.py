"""The search in any executor, compared with a trial of all layouts and with exact counts."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import product
from math import log, sqrt
from multiprocessing import get_context
from statistics import NormalDist
from typing import Any

import pytest

from unisono import planner
from unisono.pipeline import SCHEDULES
from unisono.planner.constants.calibrated_constants import default_constants

MODEL = planner.load_model("gpt3-7.5b")
CLUSTER = planner.Cluster.parse("a100:32")
JOB = planner.Workload(seq=2048, global_batch=64)


def axes(layout: planner.Layout) -> tuple[int, ...]:
    return layout.tp, layout.pp, layout.cp, layout.ep


@cache
def everything(job: planner.Workload) -> list[planner.Prediction]:
    """Returns the predictions of all layouts that fit, by trying each layout."""
    found = []
    sizes = product(
        (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32), (1, 2), (False, True), range(4), (1, 2, 4)
    )
    for tp, pp, cp, split, zero, copies in sizes:
        if tp * pp * cp > 32 or (split and tp == 1) or (zero > 1 and pp > 1):
            continue
        dp = 32 // (tp * pp * cp)
        if zero and dp * cp == 1:
            continue
        # A host has 8 devices. Replicas of shards divide among one host or two.
        if copies > 1 and (zero < 3 or dp % copies or tp * cp * dp // copies not in (8, 16)):
            continue
        for vpp, micro, recompute in product(
            range(1, 37), (1, 2, 4, 8, 16, 32, 64), ("none", "selective", "full")
        ):
            if (64 // dp) % micro or (vpp > 1 and (pp == 1 or (64 // dp // micro) % pp)):
                continue
            if vpp > 1 and 36 % (pp * vpp) and 38 % (pp * vpp):
                continue
            try:
                layout = planner.Layout(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    cp=cp,
                    vpp=vpp,
                    sequence_parallel=split,
                    zero=zero,
                    dp_replicate=copies,
                )
                each = planner.predict(
                    MODEL, CLUSTER, layout, replace(job, micro_batch=micro, recompute=recompute)
                )
            except ValueError:
                continue
            if each.headroom_bytes >= 0.1 * each.capacity_bytes:
                found.append(each)
    return sorted(found, key=lambda each: each.step_s)


def test_nothing_better_is_skipped() -> None:
    expected = everything(JOB)
    rows: dict[tuple[int, ...], planner.Prediction] = {}
    for each in expected:
        rows.setdefault(axes(each.layout), each)
    for folded, best in ((False, expected), (True, list(rows.values()))):
        for keep in (1, 12, 20):
            found = planner.search(MODEL, CLUSTER, JOB, keep=keep, folded=folded)
            assert [each.prediction.step_s for each in found] == pytest.approx(
                [each.step_s for each in best[:keep]]
            )
            counts = found.counts
            assert counts.considered == counts.too_large + counts.bounded + counts.predicted
            assert counts.predicted < len(expected)


def test_alternatives_are_the_best_of_other_settings() -> None:
    expected = everything(JOB)
    for each in planner.search(MODEL, CLUSTER, JOB, keep=6):
        variants = [e for e in expected if axes(e.layout) == axes(each.layout)]
        found = {one.setting: one for one in each.alternatives}
        for name, mine in (
            ("micro", lambda step: step.job.micro_batch),
            ("recompute", lambda step: step.job.recompute),
            ("zero", lambda step: step.layout.zero),
            ("sp", lambda step: step.layout.sequence_parallel),
            ("replicas", lambda step: step.layout.dp_replicate),
            ("vpp", lambda step: step.layout.vpp),
        ):
            others = [e.step_s for e in variants if mine(e) != mine(each.prediction)]
            assert (name in found) == bool(others), name
            if others:
                assert found[name].step_s == pytest.approx(min(others))
        times = [one.step_s for one in each.alternatives]
        assert times == sorted(times) and times[0] >= each.prediction.step_s


def test_candidates_are_complete() -> None:
    found = planner.search(MODEL, CLUSTER, JOB, keep=3)
    assert len(found) == 3 and len(found[:2]) == 2
    first = found[0]
    again = planner.predict(MODEL, CLUSTER, first.layout, first.job)
    assert again.step_s == pytest.approx(first.prediction.step_s)
    assert first.prediction.fits and first.next_lost.startswith("+")
    assert found[2].next_lost == ""
    assert len({axes(each.layout) for each in found}) == 3


def test_near_ties_are_named() -> None:
    """Tests the chances against the formula: the runs share the error of their source, and those of
    exchanges and of the host as far as the shares agree. Each run has an error of its own.
    """
    found = planner.search(MODEL, CLUSTER, JOB, keep=30)
    sigma = default_constants().sigma
    first = found[0].prediction
    for each in found:
        step = each.prediction
        shares = [
            first.causes.exchange - step.causes.exchange,
            first.causes.host - step.causes.host,
        ]
        variance = 2 * sigma["run"] ** 2 + (shares[0] * sigma["exchange"]) ** 2
        variance += (shares[1] * sigma["host"]) ** 2
        if (first.layout.zero >= 2) != (step.layout.zero >= 2):  # other software
            variance += 2 * sigma["source"] ** 2
        z = log(step.step_s / first.step_s) / sqrt(variance)
        assert each.chance == pytest.approx(NormalDist().cdf(-z), abs=1e-6)
    tied = [row for row, each in enumerate(found, 1) if each.chance >= 0.1]
    assert 1 < len(tied) < 30 and len(found.ties) == len(tied)
    is_range = tied == list(range(1, len(tied) + 1))
    rows = f"1 to {len(tied)}" if is_range else ", ".join(map(str, tied))
    assert found.tie_text().startswith(f"rows {rows} tie: ")


def test_own_runs_order_layouts_with_less_doubt() -> None:
    """Tests that own runs tell two layouts with other shares of exchanges apart better."""
    job = replace(JOB, micro_batch=1, recompute="full")
    layouts = [planner.Layout(dp=32 // tp, tp=tp, zero=1) for tp in (1, 8)]
    runs = [planner.predict(MODEL, CLUSTER, each, job) for each in layouts]
    known = planner.Calibration(
        runs=tuple(
            each.as_own_run(each.layout.text(), each.step_s) for each in runs for _ in range(6)
        )
    )
    blind, sure = (
        planner.predict(MODEL, CLUSTER, layouts[1], job, calibration=given).ratio_deviation(
            planner.predict(MODEL, CLUSTER, layouts[0], job, calibration=given)
        )
        for given in (None, known)
    )
    assert sure < blind


def test_any_executor() -> None:
    with ThreadPoolExecutor(2) as pool:
        parts = planner.search(MODEL, CLUSTER, JOB, executor=pool)
    whole = planner.search(MODEL, CLUSTER, JOB)
    assert [each.layout for each in parts] == [each.layout for each in whole]


def test_stated_values_are_kept() -> None:
    job = replace(JOB, micro_batch=2, recompute="full")
    for each in planner.search(MODEL, CLUSTER, job):
        assert (each.job.micro_batch, each.job.recompute) == (2, "full")


def test_schedules() -> None:
    found = planner.search(MODEL, CLUSTER, JOB, schedules=("zb1p", "gpipe"), keep=50)
    assert {each.layout.schedule for each in found} <= {"zb1p", "gpipe"}


def test_every_schedule_on_layers_that_divide_badly() -> None:
    model = replace(MODEL, layers=13)
    found = planner.search(model, CLUSTER, JOB, schedules=tuple(SCHEDULES), keep=400)
    for each in found:
        again = planner.predict(model, CLUSTER, each.layout, each.job)
        assert again.step_s == pytest.approx(each.prediction.step_s)
    layout = planner.Layout(pp=8, dp=4, vpp=None, schedule="zbv")
    with pytest.raises(ValueError, match=r"zbv needs 2 groups of layers on each of 8 stages"):
        planner.predict(model, CLUSTER, layout, JOB)


def test_nothing_fits() -> None:
    job = planner.Workload(seq=2048, global_batch=8)
    with pytest.raises(ValueError, match=r"nothing fits: .* needs least, .* GB"):
        planner.search(planner.load_model("gpt3-1t"), planner.Cluster.parse("a100:8"), job)


def test_experts_are_divided() -> None:
    found = planner.search(
        planner.load_model("qwen3-30b-a3b"),
        planner.Cluster.parse("h100:16"),
        planner.Workload(seq=4096, global_batch=64),
        keep=5,
    )
    assert any(each.layout.ep > 1 for each in found)


class ClusterExecutor:
    """Passes arguments and results through pickle, as clusters do, and has only `submit`."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        call = pickle.dumps((fn, args))

        def run() -> Any:
            function, given = pickle.loads(call)
            return pickle.loads(pickle.dumps(function(*given)))

        return self._pool.submit(run)


def test_executors_of_other_processes() -> None:
    with ThreadPoolExecutor(2) as pool:
        executor = ClusterExecutor(pool)
        found = planner.search(MODEL, CLUSTER, JOB, executor=executor, keep=12)
        front = planner.pareto_front(MODEL, CLUSTER, JOB, executor=executor)
        curve = planner.scaling_curve(MODEL, CLUSTER, JOB, executor=executor)
    assert front == planner.pareto_front(MODEL, CLUSTER, JOB)
    assert curve == planner.scaling_curve(MODEL, CLUSTER, JOB)
    assert found.entries == planner.search(MODEL, CLUSTER, JOB, keep=12).entries
    again = pickle.loads(pickle.dumps(found[0].prediction))
    assert again == found[0].prediction and again.memory == found[0].prediction.memory


def test_dualpipe_overlaps_exchanges_of_experts() -> None:
    model = planner.load_model("deepseek-v3")
    cluster = planner.Cluster.parse("h800:2048")
    job = planner.Workload(seq=4096, global_batch=15360, micro_batch=1, precision="fp8")
    steps = {
        schedule: planner.predict(
            model,
            cluster,
            planner.Layout(dp=128, pp=16, ep=64, zero=1, vpp=2, schedule=schedule),
            job,
        )
        for schedule in ("zbv", "dualpipev")
    }
    assert steps["dualpipev"].time["expert"] < steps["zbv"].time["expert"]
    assert steps["dualpipev"].step_s < steps["zbv"].step_s
    with pytest.raises(ValueError, match=r"dualpipev needs 2 x pp = 32 microbatches, not 1"):
        planner.predict(
            model,
            cluster,
            planner.Layout(dp=128, pp=16, ep=64, vpp=2, schedule="dualpipev"),
            planner.Workload(seq=4096, global_batch=128, micro_batch=1, precision="fp8"),
        )


def test_processes_search_a_mixture_of_experts() -> None:
    """Tests that a search in two processes returns the same candidates as a search in this process.
    Candidates of equal times must also keep their order.
    """
    model = planner.load_model("qwen3-30b-a3b")
    cluster = planner.Cluster.parse("h100:16")
    job = planner.Workload(seq=4096, global_batch=64, micro_batch=1)
    alone = planner.search(model, cluster, job, keep=30)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        divided = planner.search(model, cluster, job, keep=30, executor=pool)
    assert divided.entries == alone.entries
    assert divided.counts.considered == alone.counts.considered


def test_headroom() -> None:
    """Tests that layouts leave headroom if any layout does, and only then."""
    fastest = planner.search(MODEL, CLUSTER, JOB, headroom=0.0)[0].prediction
    for headroom in (0.1, 0.4, 0.7):
        found = planner.search(MODEL, CLUSTER, JOB, headroom=headroom)
        best = found[0].prediction
        assert best.headroom_bytes >= headroom * best.capacity_bytes
        assert best.step_s >= fastest.step_s
    without = planner.search(MODEL, CLUSTER, JOB, headroom=0.0)
    assert planner.search(MODEL, CLUSTER, JOB, headroom=0.99)[0] == without[0]
    with pytest.raises(ValueError, match="headroom must be at least 0 and under 1, not 1: a share"):
        planner.search(MODEL, CLUSTER, JOB, headroom=1)
