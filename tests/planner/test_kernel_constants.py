"""Constants of matrix products that differ between architectures."""

from __future__ import annotations

import pytest

from unisono.planner import Device
from unisono.planner.constants.calibrated_constants import default_constants
from unisono.planner.inputs.devices import device_named
from unisono.planner.step_times.kernel_times import KernelTimes

CONSTANTS = default_constants()
LOSSES = {"ampere": 0.5, "hopper": 2.0, "blackwell": 1.0}


@pytest.mark.parametrize(
    ("device", "tiles"),
    [("a100", 0.5), ("h100", 2.0), ("gb200", 1.0), ("v100", 0.5), ("mi300x", 2.0)],
)
def test_lost_tiles_depend_on_the_architecture(device: str, tiles: float) -> None:
    """Compares the time of a large product with that without lost tiles. The difference is the time
    of the lost tiles of 128 x 128 outputs on all multiprocessors. Devices of other vendors and
    older devices have the constants of the most similar architecture.
    """
    kind: Device = device_named(device)
    constants = CONSTANTS.changed(inner_loss=0.0, tile_loss=LOSSES)
    none = constants.changed(tile_loss=dict.fromkeys(LOSSES, 0.0))
    inner = 8192
    seconds = [
        KernelTimes(kind, each, precision="fp16").product_s(8192, 8192, inner)
        for each in (constants, none)
    ]
    rate = kind.peak_of("fp16") * constants.matmul(kind.architecture, "fp16") * kind.clock
    lost = tiles * kind.units * 128 * 128
    assert seconds[0] - seconds[1] == pytest.approx(2 * lost * inner / rate, rel=1e-6)
