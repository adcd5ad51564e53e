"""The smallest change that makes a layout fit, in many cases, against a trial of single changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from unisono import planner
from unisono.planner import Layout, Workload

CASES = [
    (model, cluster, layout, micro, recompute)
    for model, cluster, layouts in (
        ("llama3-8b", "a100-40gb:8", ("dp=8", "dp=8,zero=1", "dp=4,tp=2", "dp=2,tp=2,pp=2,zero=1")),
        ("gpt3-22b", "a100:16", ("dp=16", "dp=16,zero=2", "dp=2,tp=8", "dp=4,pp=4,zero=1")),
        ("llama3-70b", "h100:64", ("dp=8,tp=8", "dp=64,zero=3", "dp=4,tp=4,pp=4,zero=1")),
        ("qwen3-30b-a3b", "h100:16", ("dp=16,ep=8", "dp=16,ep=16,zero=1", "dp=8,pp=2,ep=4")),
    )
    for layout, micro, recompute in product(layouts, (1, 4), ("none", "selective", "full"))
]


def single_changes(layout: Layout, job: Workload, domain: int) -> Iterator[tuple[Any, Any]]:
    """Yields the layouts and workloads that differ in one setting."""
    order = ("none", "selective", "full")
    for recompute in order[order.index(str(job.recompute)) + 1 :]:
        yield layout, replace(job, recompute=recompute)
    for zero in range(layout.zero + 1, 4 if layout.pp == 1 else 2):
        yield replace(layout, zero=zero), job
    for micro in (1, 2):
        yield layout, replace(job, micro_batch=micro)
    if layout.tp > 1:
        yield replace(layout, sequence_parallel=True), job
    for axis, factor in product(("tp", "pp", "cp"), (2, 4, 8)):
        more = getattr(layout, axis) * factor
        if layout.dp % factor == 0 and (axis != "tp" or more <= domain):
            try:
                yield replace(layout, dp=layout.dp // factor, **{axis: more}), job
            except ValueError:
                continue


def test_changes_of_many_layouts() -> None:
    found = {"": 0, "one": 0, "two": 0, "none": 0}
    for model, cluster, text, micro, recompute in CASES:
        layout = Layout.parse(text)
        job = Workload(seq=4096, global_batch=256, micro_batch=micro, recompute=recompute)
        now = planner.predict(model, cluster, layout, job)
        machine = planner.Cluster.parse(cluster)
        change = planner.smallest_change(planner.load_model(model), machine, layout, job)
        if now.fits:
            assert change is not None and not change.text and change.prediction == now
            found[""] += 1
            continue
        best_s = float("inf")
        for other, work in single_changes(layout, job, machine.domain):
            try:
                step = planner.predict(model, cluster, other, work)
            except ValueError:
                continue
            if step.fits:
                best_s = min(best_s, step.step_s)
        if change is None:
            assert best_s == float("inf")
            found["none"] += 1
            continue
        assert change.prediction.fits and change.text
        is_single = best_s < float("inf")
        assert ("," in change.text) != is_single, (text, change.text)
        if is_single:
            assert change.prediction.step_s <= best_s * (1 + 1e-9)
        again = change.prediction
        assert planner.predict(model, cluster, again.layout, again.job).fits
        found["one" if is_single else "two"] += 1
    assert found[""] > 10 and found["one"] > 10 and found["two"] > 2, found
