"""The fit of memory finds hidden constants, and leaves a source's own peaks out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from memory_fit import MemoryFit, measured_bytes
from published_runs import PublishedRun, predict_run, published_runs

from unisono.planner.constants.calibrated_constants import constants_document, default_constants

NAMES = ("FlagPerf, Paddle", "torchtitan", "KempnerForge")
RUNS = [run for run in published_runs() if run.memory_bytes and run.source in NAMES]
DEFAULT = default_constants()
RANGES = {
    name: constants_document()["constants"][name]["range"]
    for name in ("fragmentation", "communicator_bytes")
}


def hidden(run: PublishedRun, fragmentation: float, communicator_bytes: float) -> PublishedRun:
    """Returns the run with the memory that other constants predict, as its source prints it."""
    constants = DEFAULT.changed(fragmentation=fragmentation, communicator_bytes=communicator_bytes)
    return replace(run, memory_bytes=measured_bytes(run, predict_run(run, constants)))


@pytest.mark.parametrize(("factor", "nbytes"), [(0.25, 0.75), (0.75, 0.25)])
def test_hidden_constants_are_found(factor: float, nbytes: float) -> None:
    ends = zip((factor, nbytes), RANGES.items(), strict=True)
    wanted = {name: low + share * (high - low) for share, (name, (low, high)) in ends}
    runs = [hidden(run, **wanted) for run in RUNS]
    entries = constants_document()["constants"]
    free = {name: {**entries[name], "prior_width": 100.0} for name in RANGES}
    found = MemoryFit(runs, DEFAULT, {"constants": free})
    assert found.values() == pytest.approx(wanted)
    assert found.error("torchtitan") == pytest.approx(0, abs=1e-6)


def test_the_peaks_of_a_source_do_not_change_its_own_error() -> None:
    """Tests that only the other sources determine the constants for a source."""
    large = [
        replace(run, memory_bytes=1.3 * run.memory_bytes) if run.source == NAMES[0] else run
        for run in RUNS
        if run.memory_bytes
    ]
    document = constants_document()
    few, many = MemoryFit(RUNS, DEFAULT, document), MemoryFit(large, DEFAULT, document)
    assert few.values(left_out=NAMES[0]) == many.values(left_out=NAMES[0])
    assert few.values() != many.values()
    assert few.error("vTrain single") is None


def test_the_measure_of_each_source() -> None:
    """Compares what a source prints with the parts of the prediction: what the driver shows has
    everything, the allocator's figure lacks the context, and live tensors have no overhead.
    """
    for run in RUNS:
        found = predict_run(run)
        kinds = {kind: each[0] for kind, each in found.memory.items()}
        outside = {"context and communicators"}
        if run.source == "torchtitan":
            left_out = outside
        else:
            left_out = {*outside, "fragmentation"} if run.source == "KempnerForge" else set()
        if run.layout.pp == 1:
            expected = sum(nbytes for kind, nbytes in kinds.items() if kind not in left_out)
            assert measured_bytes(run, found) == pytest.approx(expected, abs=2)
