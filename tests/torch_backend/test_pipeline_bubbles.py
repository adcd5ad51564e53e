"""The bubbles of all schedules on stages that sleep, compared with the closed forms.

A stage that sleeps needs no core, so the schedule alone causes the bubble.
"""

from __future__ import annotations

import pytest
import torch
from pipeline_bubbles import SCHEDULES, SleepingLayer, sleeping_run
from torch import distributed as dist

from unisono.parallel import Layout
from unisono.planner import bubble_share

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]
RANKS = 4
BACKENDS = ("unisono",)
PASS_S = 0.15
TOLERANCE = 0.05
ATTEMPTS = 5
OVERHEAD = 0.01
"""Part of a step that a rank needs besides its passes, for example to send activations."""


def test_pipeline_bubbles(outcome):
    outcome.require_success()


def own_two_stages(world):
    require_closed_forms(2)


def own_four_stages(world):
    require_closed_forms(4)


def require_closed_forms(stages):
    """Fails if a schedule's bubble differs from its closed form."""
    for schedule, chunks in SCHEDULES:
        layout = Layout(dp=RANKS // stages, pp=stages, vpp=chunks, schedule=schedule)
        for microbatches in (stages, 2 * stages, 4 * stages):
            if schedule == "dualpipev" and microbatches < 2 * stages:
                continue  # the schedule needs at least two microbatches per rank
            waits = (stages - 1) * bubble_share(layout, "none", microbatches)
            expected = waits / (microbatches + waits)
            limit = TOLERANCE * expected + OVERHEAD
            found = []
            for bubble in measured_bubbles(layout, microbatches):
                found.append(bubble)
                if abs(bubble - expected) < limit:
                    break
            assert abs(min(found) - expected) < limit, (layout, microbatches, found, expected)


def measured_bubbles(layout, microbatches):
    """Yields the bubbles of steps, after a step in which torch exchanges shapes.

    Other programs on the machine delay some steps, so there are several.
    """
    run = sleeping_run(layout, microbatches, PASS_S)
    inputs = torch.ones(layout.dp * microbatches, 8)
    layers = [each for each in run.stages[0][1].modules() if isinstance(each, SleepingLayer)]
    times = [(each, each.pass_s, each.weight_s) for each in layers]
    assert times
    for each in layers:
        each.pass_s = each.weight_s = 0.0
    run.step(inputs, torch.zeros_like(inputs))
    for each, pass_s, weight_s in times:
        each.pass_s, each.weight_s = pass_s, weight_s
    for _ in range(ATTEMPTS):
        dist.barrier()  # ranks begin together: the wait for a late rank is not a bubble
        run.step(inputs, torch.zeros_like(inputs))
        yield run.report().bubble
