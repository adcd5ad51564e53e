"""Contributions of ranks to a collective, and a comparison of the collective's result."""

from __future__ import annotations

import numpy as np
import torch


def contribution(rank, length, dtype=torch.float32, seed=0):
    """Returns a rank's contribution: small integers, whose sums are exact in every type."""
    generator = np.random.default_rng([rank, length, seed])
    return torch.from_numpy(generator.integers(0, 5, length)).to(dtype)


def contributions(world, length, dtype=torch.float32, seed=0):
    return np.stack(
        [contribution(r, length, dtype, seed).to(torch.float64).numpy() for r in range(world.size)]
    )


def require_equal(actual, expected):
    expected = torch.as_tensor(np.asarray(expected))
    torch.testing.assert_close(actual.to(expected.dtype).cpu(), expected, rtol=1e-5, atol=1e-5)
