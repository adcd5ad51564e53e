"""The cost model of one host: straight lines, their lower envelope, and the chosen algorithms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono import UnsupportedError, algorithms
from unisono.selection.one_host_cost_model import Constants, fastest, predict, work
from unisono.types import Op

SWEEP = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.BROADCAST)
SIMPLE = ("direct", "one_shot")

constants = st.builds(
    Constants,
    call_s=st.floats(1e-8, 1e-5),
    round_s=st.floats(1e-8, 1e-5),
    switch_s=st.floats(1e-8, 1e-5),
    byte_s=st.floats(1e-12, 1e-9),
    reduced_s=st.floats(1e-12, 1e-9),
)


def served(op: Op, ranks: int) -> list[str]:
    found = []
    for name in algorithms.names(op):
        try:
            algorithms.cost(op, name, ranks=ranks)
        except UnsupportedError:
            continue
        found.append(name)
    return found


@given(
    st.sampled_from(Op), st.integers(1, 40), st.integers(1, 8), st.integers(0, 1 << 27), constants
)
def test_the_fastest_is_the_least_of_all_predictions(
    op: Op, ranks: int, cores: int, nbytes: int, chosen: Constants
) -> None:
    envelope = fastest(op, ranks=ranks, cores=cores, constants=chosen)
    assert envelope[0].least == 0
    assert [part.least for part in envelope] == sorted(part.least for part in envelope)
    name = [part.algorithm for part in envelope if part.least <= nbytes][-1]
    times = {
        other: predict(op, other, ranks, nbytes, cores=cores, constants=chosen)
        for other in served(op, ranks)
        # algorithms for several hosts are never chosen for one host
        if not algorithms.find(op, other).for_hosts
    }
    assert name in times
    # Boundaries between algorithms are rounded to bytes.
    assert times[name] <= min(times.values()) + chosen.byte_s * 100 * ranks


@given(
    st.sampled_from(SWEEP),
    st.sampled_from([2, 4]),
    st.integers(1, 8),
    st.integers(8, 64 << 20),
    constants,
)
def test_the_model_of_one_host_selects_direct_or_one_shot(
    op: Op, ranks: int, cores: int, nbytes: int, chosen: Constants
) -> None:
    """Tests that this model chooses `direct` or `one_shot` for all sizes and constants.
    Measurements also favor these two.
    """
    envelope = fastest(op, ranks=ranks, cores=cores, constants=chosen)
    assert [part.algorithm for part in envelope if part.least <= nbytes][-1] in SIMPLE


@given(st.sampled_from(SWEEP), st.integers(2, 64), st.integers(1, 64))
def test_the_model_of_more_ranks_selects_simple_algorithms(op: Op, ranks: int, cores: int) -> None:
    found = {part.algorithm for part in fastest(op, ranks=ranks, cores=cores)}
    assert found <= {*SIMPLE, "recursive_doubling", "hypercube"}
    if op is not Op.ALL_REDUCE:
        assert found == {"direct"}


def test_shared_cores_cost_switches_and_bytes() -> None:
    alone = work(Op.ALL_REDUCE, "direct", ranks=4, cores=4)
    shared = work(Op.ALL_REDUCE, "direct", ranks=4, cores=2)
    assert (alone.rounds, alone.switches, alone.written, alone.reduced) == (2, 0, 1.5, 0.75)
    assert (shared.rounds, shared.switches, shared.written, shared.reduced) == (2, 4, 3, 1.5)


def test_a_single_rank_and_a_barrier_cost_one_call() -> None:
    given_constants = Constants(call_s=1.0, round_s=10.0, switch_s=100.0)
    alone = predict("all_reduce", "ring", 1, 1 << 20, cores=1, constants=given_constants)
    barrier = predict("barrier", "direct", 3, 0, cores=2, constants=given_constants)
    assert (alone, barrier) == (1.0, 111.0)


def test_invalid_algorithms_are_not_predicted() -> None:
    with pytest.raises(UnsupportedError, match="no algorithm"):
        predict("all_reduce", "rings", 4, 8, cores=2)
    with pytest.raises(UnsupportedError):
        predict("all_reduce", "bucket:3x3", 4, 8, cores=2)
