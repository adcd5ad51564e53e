"""Tests of measurements that alternate between algorithms, in a real group of ranks. Also tests
that only one of several algorithms with equal schedules is kept.
"""

from __future__ import annotations

import numpy as np
import pytest

from unisono import algorithms
from unisono.bench.algorithm_measurement import MeasurementLength, distinct, measure_alternating
from unisono.bench.cases import Case
from unisono.bench.contestant_ranks import ContestantRanks
from unisono.bench.contestants import Contestant
from unisono.types import Op

QUICK = MeasurementLength(rounds=2, budget_s=0.01, drop=1000)


@pytest.mark.parametrize("op", [op for op in Op if op is not Op.BARRIER])
@pytest.mark.parametrize("ranks", [2, 4])
def test_distinct_returns_each_set_of_transfers_once(op: Op, ranks: int) -> None:
    def transfers(name: str) -> tuple[int, frozenset[tuple[int, ...]]]:
        schedule = algorithms.build(op, name, ranks=ranks)
        c = schedule.columns
        columns = (c.round, c.src, c.src_chunk, c.dst, c.dst_chunk, c.count, c.reduce, c.channel)
        rows = np.stack([np.asarray(column, np.int64) for column in columns]).T
        return schedule.collective.parts, frozenset(map(tuple, rows.tolist()))

    names = algorithms.names(op)
    found = distinct(op, names, ranks)
    assert len({transfers(name) for name in found}) == len(found)
    assert {transfers(name) for name in found} == {transfers(name) for name in names}
    assert distinct(op, [*found, *names], ranks) == found


def test_a_race_has_times_of_all_supported_algorithms() -> None:
    case = Case(op="all_reduce", ranks=2, nbytes=4096)
    seen: list[str] = []
    with ContestantRanks(Contestant(name="unisono"), 2) as world:
        world.start()
        names = ["direct", "ring:channels=2", "bucket:3x3", "ring:block_bytes=8192"]
        times_s = measure_alternating(world, case, names, QUICK, observe=seen.append)
        assert list(times_s) == ["direct", "ring:channels=2", "ring:block_bytes=8192"]
        assert all(len(times) == 2 and min(times) > 0 for times in times_s.values())
        assert set(seen) == set(names)
        kept = measure_alternating(
            world,
            case,
            ["direct", "chain"],
            MeasurementLength(budget_s=0.01, drop=1),
            keep=["chain"],
        )
        assert "chain" in kept


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"budget_s": 0.0}, {"drop": 0.5}])
def test_an_invalid_race_length_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        MeasurementLength(**wrong)  # type: ignore[arg-type]
