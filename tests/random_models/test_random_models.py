"""Random models with random layouts: the result is that of one process, or a clear refusal.

`PYTHONPATH=tests python -m random_models --seed N --shrink` repeats the case of a seed.
"""

from __future__ import annotations

import os
import time

import pytest

pytest.importorskip("torch")

import torch

from random_models.blocks import BLOCKS
from random_models.case import Case
from random_models.draw import cases, draw_case
from random_models.found import FOUND
from random_models.judge import Verdict, compare, judge
from random_models.outcome import Outcome
from random_models.shrink import shrink
from worlds.torch_version import needs_layouts

pytestmark = pytest.mark.torch
SOAK_S = float(os.environ.get("UNISONO_SOAK_S", "600"))
"""Seconds of the slow test. An hour: UNISONO_SOAK_S=3600 make soak."""
FIRST = int(os.environ.get("UNISONO_SOAK_SEED", "100000"))
"""The first seed of the slow test."""


def _require(seed: int, case: Case) -> None:
    verdict = judge(case)
    assert not verdict.is_fault, f"seed {seed}: {verdict}\n{case.to_json()}"


SEEDS = (2, 7, 11, 17, 31, 35, 40, 49, 55, 56)


@pytest.mark.parametrize("seed", SEEDS)
def test_case_of_seed(seed):
    _require(seed, draw_case(seed))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("rank without samples", "equal"),
        ("experts behind images", "equal"),
        ("resumed loss that counts", "equal"),
        ("resumed loss whose module counts", "equal"),
        ("resumed without elements on a rank", "equal"),
        ("tied parameter of two stages of a rank, with zero", "equal"),
        ("loss that counts its parts", "refused"),
        ("parameter used twice with a split backward", "equal"),
        ("checkpoint called twice with a split backward", "equal"),
        ("spectral norm in eval mode", "equal"),
        ("module twice in a traced model", "equal"),
        ("result that its own graph needs, with a split backward", "equal"),
        ("pairs of layers whose parts differ, in a pipeline", "equal"),
        ("hook that is not linear, with ignored targets", "equal"),
    ],
)
def test_found_case(name, kind):
    case = FOUND[name]
    needs_layouts(case.layout, case.resumed or "")
    verdict = judge(case)
    assert verdict.kind == kind, verdict


@pytest.mark.slow
@pytest.mark.timeout(int(SOAK_S) + 300)
def test_cases_until_time_ends():
    deadline = time.monotonic() + SOAK_S
    for seed, case in cases(FIRST):
        if time.monotonic() > deadline:
            break
        _require(seed, case)


def test_case_is_text():
    for seed in range(200):
        case = draw_case(seed)
        assert Case.from_json(case.to_json()) == case


def _outcome(**changes):
    return Outcome(**({"losses": [1.0, 0.5], "norms": [2.0, 1.0]} | changes))


def _refusal(text, *, kinds=("ValueError",), raised_in="/src/unisono/parallel/run/x.py"):
    return _outcome(error=text, kinds=kinds, raised_in=raised_in)


CLEAR = "tp must divide heads: 2 does not divide 3; 1 does"


@pytest.mark.parametrize(
    ("outcomes", "kind"),
    [
        ([_outcome(), _outcome()], "equal"),
        ([_outcome(losses=[1.0, 0.6])] * 2, "wrong loss"),
        ([_outcome(norms=[2.0, 1.1])] * 2, "wrong norm"),
        ([_outcome(), _outcome(losses=[1.0, 0.6])], "ranks disagree"),
        ([_outcome(), None], "hang"),
        ([_refusal(CLEAR), _refusal(CLEAR)], "refused"),
        ([_refusal(CLEAR), _outcome()], "ranks disagree"),
        ([_refusal(CLEAR, raised_in="/torch/nn/modules/linear.py")] * 2, "raw error"),
        ([_refusal("heads: 3")] * 2, "error without a cure"),
        ([_refusal(CLEAR + "\nsee above")] * 2, "error of several lines"),
        ([_refusal("mixed DTensor; use one kind")] * 2, "error with internals of torch"),
        ([_refusal(CLEAR, kinds=("RuntimeError",))] * 2, "raw error"),
    ],
)
def test_verdict(outcomes, kind):
    assert compare(Case(layout="dp=2"), _outcome(), outcomes).kind == kind


def test_accepted_misuse_is_a_fault():
    verdict = compare(Case(layout="dp=2", habit="own_part"), _outcome(), [_outcome()] * 2)
    assert verdict.is_fault


def test_smaller_case_keeps_the_fault():
    case = Case(layout="dp=2,zero=3", blocks=("linear", "max_norm", "mlp"), clip=0.3, width=8)

    def judged(each: Case) -> Verdict:
        is_wrong = "max_norm" in each.blocks and "dp=2" in each.layout
        return Verdict(kind="wrong loss" if is_wrong else "equal", detail="")

    found, _ = shrink(case, judged(case), judged=judged)
    assert found == Case(layout="dp=2", blocks=("max_norm",), batches=((8, 4),))


@pytest.mark.parametrize("name", BLOCKS)
def test_block_keeps_the_shape(name):
    x = y = torch.randn(3, 4, 6, requires_grad=True) * 1.0
    for module in BLOCKS[name].make(6):
        y = module(y)
    assert y.shape == x.shape
