"""Reproducible averages of gradients are sums in rank order, for all buckets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from ranks import Threads  # noqa: E402
from unisono import Communicator  # noqa: E402
from unisono.controller import Controller  # noqa: E402
from unisono.parallel import DistributedOptimizer, data_parallel  # noqa: E402

pytestmark = pytest.mark.torch

World = Callable[[int], Threads]
STEPS, ROWS, WIDTH = 4, 4, 6


class _Net(nn.Module):
    """A model with two branches, of which `forward` may omit one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.right = nn.Linear(WIDTH, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Any, branch: str = "both") -> Any:
        hidden = self.first(x) if branch == "left" else self.first(x) + self.right(x)
        return self.last(torch.tanh(hidden))


torch.manual_seed(3)
_TEMPLATE = _Net()  # one model to copy, since ranks that are threads share torch's random generator


def _batch(step: int, rank: int) -> Any:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def _rank_order_average(parts: np.ndarray) -> bytes:
    """Returns the sum of all ranks' arrays in rank order, divided once at the end."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return (total / parts.dtype.type(len(parts))).tobytes()


@pytest.fixture(scope="module")
def ring_world() -> Iterator[Threads]:
    """Yields ranks that use ring all_reduces unless calls are reproducible. In a ring, the order of
    additions depends on an element's position.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_ALGORITHM", "all_reduce=ring")
        with Threads(4) as world:
            yield world


def _averages(comm: Communicator, wrap: str, fusion_bytes: int, reproducible: bool) -> list[bytes]:
    net = copy.deepcopy(_TEMPLATE)
    options: Any = {"comm": comm, "fusion_bytes": fusion_bytes, "reproducible": reproducible}
    model: Any = data_parallel(net, **options) if wrap == "model" else net
    closes = model
    if wrap == "optimizer":
        closes = DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net, **options)
    exact = []
    for step in range(STEPS):
        closes.zero_grad()
        with closes.no_sync():
            scale = 10.0 ** ((5 * comm.rank + 3 * step) % 7)
            (model(_batch(step, comm.rank)).sum() * scale).backward()
        used = [each for each in net.parameters() if each.grad is not None]
        parts = [comm.all_gather(each.grad.numpy()[None].copy()) for each in used]
        # a backward pass that adds zeros and exchanges the accumulated gradients
        (model(torch.zeros(ROWS, WIDTH), "left").sum() * 0).backward()
        found = [each.grad.numpy().tobytes() for each in used]
        exact.append(found == [_rank_order_average(part) for part in parts])
    closes.close()
    return [*found, repr(exact).encode()]


@pytest.mark.parametrize("wrap", ["model", "optimizer"])
def test_reproducible_averages_are_sums_in_rank_order(wrap: str, ring_world: Threads) -> None:
    all_exact = repr([True] * STEPS).encode()
    results = []
    for fusion_bytes in (0, 1000, 64 << 20):
        by_rank = ring_world.run(_averages, wrap, fusion_bytes, True)
        assert all(found == by_rank[0] for found in by_rank)
        results.append(by_rank[0])
    assert all(found == results[0] for found in results)
    assert results[0][-1] == all_exact
    usual = ring_world.run(_averages, wrap, 1000, False)[0]
    # without reproducible calls the results differ; otherwise this test proves nothing
    assert usual[-1] != all_exact


def test_a_reproducible_communicator_makes_reproducible_averages() -> None:
    with Threads(3, reproducible=True) as world:
        assert world.run(_averages, "model", 1000, False)[0][-1] == repr([True] * STEPS).encode()


def test_reproducible_makes_its_own_controller(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with (
            Controller(comm) as controller,
            pytest.raises(ValueError, match="reproducible: expected no controller"),
        ):
            data_parallel(_Net(), comm, controller=controller, reproducible=True)

    threads(1).run(check)
