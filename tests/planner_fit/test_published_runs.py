"""The table of published runs: its sources, its columns, and the errors on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from published_runs import TABLE, grouped, predict_run, published_runs, thinned

from unisono import planner


def test_each_source_has_a_line() -> None:
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("# source ")]
    named = [part for line in lines for part in line.split('"')[1::2]]
    starts = tuple(name.removesuffix("...").strip() for name in named)
    sources = {run.table_source for run in published_runs()}
    assert len(published_runs()) > 1450 and len(sources) > 60
    assert all(source.startswith(starts) for source in sources)
    assert len({run.source for run in published_runs()}) == 41


def test_rates_are_possible() -> None:
    """Tests each measured time against the peak rate of the devices: the FLOPs of a step without
    recomputation are 6 for each active parameter (the look-up in the embedding has none) and token,
    and 6 x layers x heads x head size x sequence of causal attention.
    """
    for run in published_runs():
        model, device = run.model, run.cluster.kind
        looked_up = 0 if model.tied else model.vocab * model.hidden
        attention = model.layers * model.heads * model.head_dim * run.job.seq
        flops = 6 * run.job.tokens * (model.active_parameters - looked_up + attention)
        seconds = flops / device.peak_of(run.job.precision) / run.cluster.devices
        assert 0.005 < seconds / run.measured_s < 0.8, (run.source, run.name, run.layout.text())


def test_columns() -> None:
    models = {run.name: run.model for run in published_runs()}
    known = planner.load_model("deepseek-v3")
    run = next(run for run in published_runs() if run.source == "arXiv 2412.19437")
    assert run.model == known
    # The benchmark of NeMo AutoModel sends a token to neighbouring experts.
    assert models["DeepSeek-V3"] == replace(known, expert_groups=256 // 8, token_groups=1)
    assert models["Kimi K2"].parameters == pytest.approx(1.03e12, rel=0.01)
    assert models["Grok-1, 64 layers"].parameters == pytest.approx(314e9, rel=0.01)
    layouts = [run.layout for run in published_runs()]
    assert {layout.schedule for layout in layouts} == {"1f1b", "zb1p", "dualpipev"}
    rates = {run.source: run.cluster.network_Bps for run in published_runs()}
    assert rates["BLOOM tuning"] == 6.25e9 and rates["KempnerForge"] is None
    assert rates["vTrain multi"] == 12.5e9
    software = {run.source: run.job.software for run in published_runs()}
    assert software["MT-NLG 530B"] == "megatron-deepspeed" and software["KempnerForge"] is None


def test_thinned_keeps_small_sources() -> None:
    few = thinned(published_runs(), 20)
    for source, runs in grouped(published_runs(), lambda run: run.source):
        kept = sum(run.source == source for run in few)
        assert kept == len(runs) if len(runs) <= 20 else 10 <= kept <= 20


def test_errors_of_the_shipped_constants() -> None:
    """Tests the means over the sources."""
    errors, covered = [], []
    for _, runs in grouped(thinned(published_runs(), 10), lambda run: run.source):
        steps = [(run.measured_s, predict_run(run)) for run in runs]
        errors.append(np.mean([abs(step.step_s / seconds - 1) for seconds, step in steps]))
        covered.append(np.mean([step.low_s <= seconds <= step.high_s for seconds, step in steps]))
    assert np.mean(errors) < 0.16 and np.median(errors) < 0.13
    assert 0.8 < np.mean(covered) < 0.95


def test_published_runs_fit() -> None:
    """Tests that at least 96 % of the runs that did run are predicted to fit."""
    assert np.mean([predict_run(run).fits for run in published_runs()]) > 0.96


def test_pairs_with_and_without_compile() -> None:
    """Compares the ratio of both times with torchtitan's on 8 and on 128 devices."""
    runs = [run for run in published_runs() if run.table_source.startswith("torchtitan ")]
    eager = [run for run in runs if run.job.software == "torch-eager"]
    assert [run.note for run in eager] == ["FSDP8", "FSDP128"]
    for run in eager:
        compiled = replace(run.job, software=None)
        [pair] = [each for each in runs if (each.cluster, each.job) == (run.cluster, compiled)]
        seconds = [predict_run(each).step_s for each in (run, pair)]
        published = run.measured_s / pair.measured_s
        assert published > 1.15
        assert seconds[0] / seconds[1] == pytest.approx(published, rel=0.06)
