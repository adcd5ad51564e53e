"""The layers of pipeline stages add up to those of the model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.planner.inputs.layer_division import stage_layers


@given(
    layers=st.integers(1, 200),
    stages=st.integers(1, 20),
    chunks=st.integers(1, 6),
)
def test_layers_are_divided(layers: int, stages: int, chunks: int) -> None:
    if layers < stages * chunks and layers + 2 != stages * chunks:
        with pytest.raises(ValueError, match=f"{layers} layers cannot fill"):
            stage_layers(layers, stages, chunks)
        return
    found = stage_layers(layers, stages, chunks)
    assert sum(found) == layers and len(found) == stages
    if layers % stages == 0 and layers % (stages * chunks) == 0:
        assert set(found) == {layers // stages}
