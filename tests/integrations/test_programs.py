"""Each framework's program trains over Unisono with the losses that it has over Gloo.

A framework that is not installed is skipped. `run.py --test` of benchmarks/integrations runs these
tests in the environment of each framework.
"""

from __future__ import annotations

import sys

import pytest
from frameworks import FRAMEWORKS
from program_run import trained

pytestmark = pytest.mark.torch


@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.folder)
def test_losses_are_those_over_gloo(framework):
    pytest.importorskip(framework.name_of_module)
    over_gloo, over_unisono = (
        trained(framework, sys.executable, 2, served_by) for served_by in ("torch", "unisono")
    )
    assert len(over_gloo["losses"]) > 50
    if framework.compares == "tokens":
        assert over_unisono["losses"] == over_gloo["losses"]
        return
    assert over_unisono["losses"] == pytest.approx(over_gloo["losses"], rel=1e-3)
    assert over_gloo["losses"][-1] < over_gloo["losses"][0] / 2  # the program trains
