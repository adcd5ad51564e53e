"""All orders of events in small worlds, and random orders in larger worlds.

Here a plan is frozen after one step, so that short programs can follow and leave plans.
"""

from __future__ import annotations

import pytest

from controller.simulated_rank import Ask, Close, Command, JoinAll, Submit, Wait
from controller.world import World, explore, step_of

A, B = step_of("a"), step_of("b")
AB, BA = step_of("ab"), step_of("ba")
LONGER = step_of("a", shape=(3,))

PAIRS: dict[str, tuple[list[Command], list[Command]]] = {
    "one tensor": (A * 3, A * 3),
    "two tensors": (AB + AB, BA + AB),
    "dependent": (A + B + A + B, A + B + A + B),
    "a name vanishes": (AB + A, AB + A),
    "a name is new": (A + A + AB, A + A + BA),
    "other shape on one rank": (A * 2 + LONGER + A, A * 4),
    "other shape on both ranks": (A * 2 + LONGER, A * 2 + LONGER),
    "joins early": ([*(A * 3), JoinAll()], [*(A * 2), JoinAll()]),
    "joins before the end": ([*A, *A, Submit("b"), JoinAll(), Wait("b")], [*A, *A, JoinAll()]),
    "asks for stalls": ([*A, *A, Submit("a"), Ask(), Wait("a")], A * 3),
    "closes early": (A * 3, [*A, *A, Close()]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_every_order_of_two_ranks_ends_well(name: str) -> None:
    world = World(PAIRS[name], freeze_after=1, wire=False, whole_turns=True)
    assert explore(world) > 100


def test_every_order_ends_well_if_programs_move_within_turns() -> None:
    for name in ("one tensor", "other shape on one rank"):
        assert explore(World(PAIRS[name], freeze_after=1, wire=False)) > 100


THREES: list[tuple[list[Command], ...]] = [
    (AB * 4, BA * 4, AB * 4),
    (A + B + A + B + A + B, A + BA + AB + B, AB + A + B + BA),
    (AB * 3 + A * 2 + AB, BA * 3 + A * 2 + BA, AB * 3 + A * 2 + AB),
    (AB * 3 + LONGER + B + AB, AB * 4 + AB, BA * 5),
    ([*(AB * 4), JoinAll(), *AB], [*(AB * 2), JoinAll(), *AB], [*(AB * 3), JoinAll(), *AB]),
]


@pytest.mark.parametrize("programs", THREES)
@pytest.mark.parametrize("freeze_after", [1, 2])
def test_random_orders_of_three_ranks_end_well(
    programs: tuple[list[Command], ...], freeze_after: int
) -> None:
    for seed in range(15):
        World(programs, freeze_after=freeze_after).run_at_random(seed)
