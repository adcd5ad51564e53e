"""The phases and exchanges that a run of `parallelize` records in the timeline."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import distributed as dist

from cases_in_turn import turn
from unisono.parallel import Layout
from unisono.parallel.run import parallelize
from unisono.timeline import summarize_steps
from unisono.timeline.rank_spans import spans_of
from unisono.torch_backend import default_communicator

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)
STEPS, MICROBATCHES = 3, 4


def test_run_timeline(outcome):
    outcome.require_success()


def a_dump(text: str):
    """Trains a few steps; returns what this rank recorded meanwhile."""
    timeline = default_communicator().timeline
    torch.manual_seed(1)
    run = parallelize(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)),
        Layout.parse(text),
        loss=torch.nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        microbatches=MICROBATCHES,
    )
    before = timeline.now_ns()
    for _ in range(STEPS):
        run.step(torch.ones(8, 4), torch.zeros(8, 4))
    run.mesh.close()
    dump = timeline.dump()
    return before, replace(dump, events=dump.events[dump.events["time_ns"] >= before])


def own_phases_and_exchanges(world):
    for text in ("dp=2,zero=1", "pp=2"):
        with turn(text=text):
            before, dump = a_dump(text)
            spans = spans_of(dump)
            passes = {(name, step): MICROBATCHES for name in ("forward", "backward")
                      for step in range(1, STEPS + 1)}  # fmt: skip
            expected = passes | {("optimizer", step): 1 for step in range(1, STEPS + 1)}
            assert Counter((each.name, each.step) for each in spans.phases) == expected
            for each in spans.phases:
                assert each.whole
                assert before <= each.when.begun_ns <= each.when.ended_ns <= spans.extent.ended_ns
            names = Counter(name for each in spans.collectives for name in each.tensors)
            exchanges = ("gradients", "loss and norm", "parameters")
            assert names == dict.fromkeys(exchanges, STEPS)
            assert all(each.moved is not None and each.ran for each in spans.collectives)
            # An exchange is in no phase, and a step's phases are in their order.
            ends = [each.when.ended_ns for each in spans.phases if each.name == "backward"]
            sums = [each.launched_ns for each in spans.collectives if "gradients" in each.tensors]
            assert ends[MICROBATCHES - 1] <= sums[0] <= ends[MICROBATCHES]
            dumps = [None] * RANKS
            dist.all_gather_object(dumps, dump)
            [job] = summarize_steps(dumps)
            assert len(job.steps) == STEPS
            assert [each.rank for each in job.steps[0].ranks] == [0, 1]
