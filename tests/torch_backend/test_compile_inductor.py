"""torch.compile with the C++ code generator, for programs that use our collectives."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

# torch calls the program openssl when it compiles C++.
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.program("openssl")]
RANKS = 2


def test_inductor(outcome):
    outcome.require_success()


def check_inductor(world):
    @torch.compile(fullgraph=True)
    def program(x):
        y = x * 2
        dist.all_reduce(y)
        gathered = functional.all_gather_tensor(y + 1, 0, dist.group.WORLD)
        return gathered.relu()

    result = program(torch.full((4,), 1.0 + world.rank))
    torch.testing.assert_close(result, torch.full((8,), 7.0))
