from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.algorithms import build, measure, names
from unisono.algorithms.cost import Cost
from unisono.algorithms.grid import Grid, near_square
from unisono.algorithms.hamiltonian import hamiltonian_cycles
from unisono.algorithms.schedule_composition import (
    Composer,
    backwards,
    in_channels,
    in_sequence,
    runs,
)
from unisono.errors import UnsupportedError
from unisono.schedule import Collective, check
from unisono.types import Op

FORWARDS = [(op, n) for op in ("all_gather", "broadcast", "scatter") for n in names(op)]


@pytest.mark.parametrize(("op", "name"), FORWARDS)
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_every_operation_is_correct_when_reversed(op: str, name: str, ranks: int) -> None:
    if name in ("gather_broadcast", "scatter_all_gather"):
        return  # some ranks receive a chunk twice, so these schedules cannot be reversed
    forward = build(op, name, ranks=ranks, root=ranks // 2)
    back = backwards(forward)
    check(back)
    assert measure(back).rounds == measure(forward).rounds
    assert sum(t.count for t in back.transfers) == sum(t.count for t in forward.transfers)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_two_halves_make_an_all_reduce(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 9))
    first = build(
        "reduce_scatter", data.draw(st.sampled_from(names("reduce_scatter"))), ranks=ranks
    )
    second = build("all_gather", data.draw(st.sampled_from(names("all_gather"))), ranks=ranks)
    check(in_sequence(Op.ALL_REDUCE, [first, second]))


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_schedules_of_one_operation_fit_in_channels(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from([op for op in Op if op is not Op.BARRIER]))
    ranks = data.draw(st.integers(1, 7))
    root = data.draw(st.integers(0, ranks - 1))
    chosen = data.draw(st.lists(st.sampled_from(names(op)), min_size=1, max_size=3))
    parts = [build(op, name, ranks=ranks, root=root) for name in chosen]
    together = in_channels(parts)
    check(together)
    assert together.num_rounds == max(part.num_rounds for part in parts)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_channel_may_have_its_own_order_of_ranks(op: str) -> None:
    part = build(op, "direct" if op == "all_to_all" else "ring", ranks=5)
    check(in_channels([part, part], [[0, 1, 2, 3, 4], [3, 0, 4, 2, 1]]))


@given(st.sets(st.integers(0, 30)))
def test_runs_cover_the_chunks(chunks: set[int]) -> None:
    found = list(runs(chunks))
    assert [c for first, count in found for c in range(first, first + count)] == sorted(chunks)
    ends = {first + count for first, count in found}
    assert not ends & {first for first, _ in found}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_grid_numbers_its_points(dims: list[int]) -> None:
    grid = Grid(dims=tuple(dims))
    assert [grid.number(grid.coords(point)) for point in range(grid.size)] == list(range(grid.size))
    for axis, size in enumerate(dims):
        lines = list(grid.lines(axis))
        assert sorted(point for line in lines for point in line) == list(range(grid.size))
        for line in lines:
            assert [grid.coords(point)[axis] for point in line] == list(range(size))
            pattern: list[int | None] = list(grid.coords(line[0]))
            pattern[axis] = None
            assert grid.points(pattern) == line


@given(st.integers(1, 300), st.integers(1, 4))
def test_near_square_sizes_make_up_the_ranks(ranks: int, axes: int) -> None:
    sizes = near_square(ranks, axes)
    assert len(sizes) == axes
    assert list(sizes) == sorted(sizes, reverse=True)
    product = 1
    for size in sizes:
        product *= size
    assert product == ranks


@pytest.mark.parametrize("columns", range(3, 15))
def test_two_hamiltonian_cycles_cover_a_torus(columns: int) -> None:
    for rows in range(3, 15):
        cycles = hamiltonian_cycles((columns, rows))
        assert len(cycles) == 2
        used = set()
        for cycle in cycles:
            assert sorted(cycle) == list(range(columns * rows))
            for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True):
                across = (a % columns - b % columns) % columns in (1, columns - 1)
                along = (a // columns - b // columns) % rows in (1, rows - 1)
                assert (across and a // columns == b // columns) or (
                    along and a % columns == b % columns
                )
                used.add(frozenset((a, b)))
        assert len(used) == 2 * columns * rows, "each link once"


@pytest.mark.parametrize("dims", [(1,), (7,), (2, 2), (2, 5), (6, 2)])
def test_other_tori_have_one_cycle(dims: tuple[int, ...]) -> None:
    (cycle,) = hamiltonian_cycles(dims)
    assert sorted(cycle) == list(range(Grid(dims=dims).size))


def test_a_barrier_has_no_channels() -> None:
    with pytest.raises(UnsupportedError, match="barrier"):
        in_channels([build("barrier", "direct", ranks=2)] * 2)


def test_costs_add_up() -> None:
    ring = measure(build("reduce_scatter", "ring", ranks=4))
    assert ring + measure(build("all_gather", "ring", ranks=4)) == measure(
        build("all_reduce", "ring", ranks=4)
    )
    assert isinstance(ring, Cost)


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_an_added_part_equals_its_single_moves(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["ring", "bruck", "recursive_doubling", "direct"]))
    part = build("all_gather", name, ranks=data.draw(st.integers(1, 4)))
    ranks, shares, unit = part.collective.ranks, data.draw(st.integers(1, 3)), 2
    lines = np.array(data.draw(st.permutations(range(2 * ranks)))).reshape(2, ranks)
    held = data.draw(st.permutations(range(2 * ranks * shares)))
    places = np.array(held).reshape(2, ranks, shares)
    whole = Collective(op=Op.ALL_GATHER, ranks=2 * ranks, parts=shares * unit)
    composer = Composer(whole, unit)
    assert composer.add(part, lines, places, start=3, channel=5) == 3 + part.num_rounds

    expected = [
        (3 + t.round, line[t.src], a + j, line[t.dst], b + j, 5 + t.channel)
        for line, pieces in zip(lines.tolist(), (places * unit).tolist(), strict=True)
        for t in part.transfers
        for i in range(t.count)
        for a, b in zip(pieces[t.src_chunk + i], pieces[t.dst_chunk + i], strict=True)
        for j in range(unit)
    ]
    found = [
        (t.round, t.src, t.src_chunk + i, t.dst, t.dst_chunk + i, t.channel)
        for t in composer.build().transfers
        for i in range(t.count)
    ]
    assert sorted(found) == sorted(expected)
