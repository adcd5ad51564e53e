"""The agreement of ranks that exchange messages and then follow a frozen plan, case by case."""

from __future__ import annotations

import pytest

from controller.simulated_rank import Command, Submit, Wait
from controller.world import World, step_of
from unisono.controller import messages as m
from unisono.controller.agreement import State, step
from unisono.controller.fusion.buckets import buckets_of
from unisono.controller.rank_state import (
    Adopt,
    Closes,
    EnterPlan,
    HasDrained,
    HasStopped,
    Mode,
    Received,
    Send,
    Submitted,
    WantsStalls,
)
from unisono.controller.request import Request, disagreement
from unisono.types import DType

SEEDS = range(8)
ORDERS = ("abc", "cab", "bca")


def worlds(*programs: list[Command], **options: object) -> list[World]:
    """Returns worlds in which the programs ran, with different delays in each world."""
    return [World(programs, **options).run_at_random(seed) for seed in SEEDS]


def tensor(name: str, count: int = 2, **options: object) -> Request:
    given = {"operation": "all_reduce", "dtype": DType.FLOAT32, "shape": (count,)}
    return Request(name=name, **(given | options))


# ---- agreement by messages


def test_ranks_run_tensors_submitted_in_different_orders() -> None:
    for world in worlds(*(step_of(order) for order in ORDERS)):
        assert sorted("".join(map("".join, world.ran()))) == ["a", "b", "c"]


def test_one_rank_alone_runs_its_tensors() -> None:
    for world in worlds(step_of("ab") * 5):
        assert world.frozen and world.sent == []


@pytest.mark.parametrize(
    ("what", "odd", "usual_text", "odd_text"),
    [
        ("operation", {"operation": "broadcast", "root": 0}, "all_reduce", "broadcast"),
        ("dtype", {"dtype": "float64"}, "float32", "float64"),
        ("shape", {"shape": (3,)}, "(2,)", "(3,)"),
        ("op", {"op": "max"}, "sum", "max"),
        ("root", {"root": 2}, "-1", "2"),
        ("group", {"group": ("w",)}, "()", "('w',)"),
    ],
)
def test_mismatch_names_values_and_ranks(
    what: str, odd: dict[str, object], usual_text: str, odd_text: str
) -> None:
    usual = [*step_of("w"), *step_of("ab")]
    for world in worlds(usual, [*step_of("w", **odd), *step_of("ba")], usual):
        expected = (
            f"tensor 'w': the ranks disagree about its {what}: "
            f"{usual_text} on ranks 0 and 2, {odd_text} on rank 1"
        )
        assert [world.texts(rank) for rank in range(3)] == [{"w": expected}] * 3
        assert sorted("".join(map("".join, world.ran()))) == ["a", "b"]


def test_mismatch_of_a_gather_names_whole_shapes() -> None:
    rows = [tensor("g", shape=shape, operation="all_gather") for shape in ((2, 3), (5, 4))]
    text = disagreement(dict(enumerate(rows)))
    assert text is not None and "(2, 3) on rank 0, (5, 4) on rank 1" in text
    assert disagreement({0: rows[0], 1: tensor("g", shape=(7, 3), operation="all_gather")}) is None


def test_refused_member_refuses_its_group() -> None:
    group = ("a", "b")
    usual = step_of("ab", group=group)
    odd = [Submit("a", shape=(5,), group=group), *step_of("b", group=group), Wait("a")]
    for world in worlds(usual, odd):
        texts = world.texts(0)
        assert texts.keys() == {"a", "b"} and "of which tensor 'a'" in texts["b"]
        assert world.ran() == []


def test_group_runs_together() -> None:
    group = ("a", "c")
    program = [
        Submit("a", (100,), group=group),
        Submit("b", (1,)),
        Wait("b"),
        Submit("c", (100,), group=group),
        Wait("a"),
        Wait("c"),
    ]
    for world in worlds(program * 5, program * 5, fusion_bytes=16):
        assert world.frozen
        assert [set(names) for names in world.ran() if names != ("b",)] == [{"a", "c"}] * 5


def test_buckets_hold_a_group_in_its_latest_phase() -> None:
    group = ("a", "c")
    requests = [tensor("a", group=group), tensor("b"), tensor("c", group=group, phase=1)]
    assert [each.names for each in buckets_of(requests, 1)] == [("b",), ("a", "c")]


def test_highest_priority_runs_first() -> None:
    requests = [tensor("a"), tensor("b", priority=7), tensor("c", priority=3)]
    _, actions = step(State.first(0, 1, fusion_bytes=0), [Submitted(tuple(requests))])
    assert [each.bucket.names for each in actions] == [("b",), ("c",), ("a",)]
    program = [Submit("a"), Submit("b", priority=9), Wait("a"), Wait("b")]
    for world in worlds(program * 4, step_of("ab") * 4, fusion_bytes=0):
        assert world.ran()[-2:] == [("b",), ("a",)]


def test_buckets_keep_to_their_size_and_kind() -> None:
    requests = [tensor("a", 3), tensor("b", 3), tensor("c", 9), tensor("d", 1, op="max")]
    requests += [tensor("e", 1, dtype=DType.FLOAT64), tensor("f", 1), tensor("z", 0)]
    found = [each.names for each in buckets_of(requests, 24)]
    assert found == [("a", "b"), ("c",), ("d",), ("e",), ("f", "z")]


def test_uneven_gather_has_the_rows_of_each_rank() -> None:
    programs = [step_of("g", shape=(rows, 3), operation="all_gather") * 4 for rows in (2, 0, 5)]
    for world in worlds(*programs):
        assert [job.lengths for job in world.jobs()] == [(2, 0, 5)] * 4
        assert not world.frozen  # a frozen plan cannot know each rank's number of rows in advance


def test_gather_that_becomes_uneven_leaves_the_plan() -> None:
    even, longer = (step_of("g", shape=(rows, 3), operation="all_gather") for rows in (2, 4))
    for world in worlds(even * 4 + longer + even, even * 6):
        lengths = [job.lengths for job in world.jobs()]
        assert lengths[4] == (4, 2) and len(lengths) == 6


# ---- freezing


def test_plan_is_frozen_after_two_equal_steps() -> None:
    for count, freezes in ((2, 0), (3, 1), (6, 1)):
        for world in worlds(*(step_of(order) * count for order in ORDERS)):
            assert len(world.messages(m.Freeze)) == freezes * 2  # one message to each other rank
            assert world.frozen == bool(freezes)


def test_frozen_ranks_send_no_message() -> None:
    for world in worlds(*(step_of(order) * 12 for order in ORDERS)):
        assert world.sent_after(3 * 6) == []
        assert sum(map(len, world.ran())) == 12 * 3
        # one fused bucket in each step
        assert len(world.ledger.voted) == len(world.ran()[-1:]) * 10


def test_dependent_program_is_frozen_in_its_order() -> None:
    program = [command for name in "abc" for command in step_of(name)]
    for world in worlds(program * 10, program * 10):
        assert world.sent_after(3 * 6) == []
        assert world.ran() == [("a",), ("b",), ("c",)] * 10


def test_dependent_program_on_some_ranks_is_frozen() -> None:
    dependent = [*step_of("a"), *step_of("b")]
    for world in worlds(dependent * 8, step_of("ab") * 8, step_of("ba") * 8):
        assert world.frozen and world.sent_after(4 * 4) == []
        assert world.ran()[-2:] == [("a",), ("b",)]


def test_dependent_program_is_frozen_again_after_a_break_within_a_step() -> None:
    usual = [command for name in "abc" for command in step_of(name)]
    odd = [*step_of("a"), *step_of("b"), *step_of("c", shape=(5,))]
    program = usual * 4 + odd + usual * 12
    for world in worlds(program, program, program):
        assert world.frozen and world.sent_after(len(usual) * 12) == []


def test_new_name_runs_beside_the_plan() -> None:
    usual, other = step_of("ab"), step_of("abx")
    for world in worlds(*[usual * 4 + other + usual * 3] * 3):
        assert world.frozen and world.messages(m.Thaw) == []
        assert ("x",) in world.ran()


def test_new_name_that_recurs_enters_the_plan() -> None:
    program = step_of("ab") * 4 + step_of("abx") * 12
    for world in worlds(program, program):
        assert world.frozen and [each.epoch for each in world.messages(m.Thaw)] == [2]
        assert world.ran()[-1] in {("a", "b", "x"), ("x", "a", "b"), ("a", "x", "b")}


@pytest.mark.parametrize("fusion_bytes", [0, 1 << 20])
def test_vanished_name_leaves_the_plan(fusion_bytes: int) -> None:
    program = step_of("abc") * 4 + step_of("ac") * 8
    for world in worlds(program, program, program, fusion_bytes=fusion_bytes):
        assert world.frozen and world.ranks[0].reasons
        assert "'b', which this rank has not submitted" in world.ranks[0].reasons[0]
        assert "b" not in "".join(world.ran()[-1])


def test_shape_changed_on_all_ranks_runs() -> None:
    program = step_of("ab") * 4 + step_of("ab", shape=(7,)) * 8
    for world in worlds(program, program):
        assert world.frozen and world.texts() == {}
        assert world.jobs()[-1].shapes == ((7,), (7,))


def test_shape_changed_on_one_rank_is_refused() -> None:
    odd = [Submit("a"), Submit("b", (9,)), Wait("a"), Wait("b")]
    usual = step_of("ab")
    for world in worlds(usual * 12, usual * 4 + odd + usual * 7, usual * 12):
        text = "tensor 'b': the ranks disagree about its shape: (2,) on ranks 0 and 2, (9,) on rank"
        assert text in world.texts(0)["b"] and world.frozen


def test_lasting_disagreement_of_a_plan_is_noticed_each_time() -> None:
    usual, odd = step_of("a"), step_of("a", op="max")
    for world in worlds(usual * 6, usual * 3 + odd * 3):
        refused = [key.nth for key, each in world.ranks[1].outcomes.items() if each.exception]
        assert refused == [3, 4, 5]


def test_plans_that_do_not_last_are_made_less_often() -> None:
    program = (step_of("ab") * 3 + step_of("abc") + step_of("a")) * 12
    for world in worlds(program, program):
        assert len(world.messages(m.Freeze)) < 6


def test_tensor_submitted_before_the_plan_is_adopted_enters() -> None:
    state = State.first(rank=1, size=2)
    freeze = m.Freeze(1, buckets_of([tensor("a"), tensor("b")], 1 << 20))
    state, actions = step(state, [Submitted((tensor("a"),)), Received(0, (freeze,))])
    assert actions[-1] == Adopt(1, freeze.buckets, ("a",)) and state.mode is Mode.FROZEN
    late = Submitted((tensor("b"), tensor("x")))
    state, actions = step(state, [late])
    assert actions == (EnterPlan(("b",)), Send(0, m.Announce(1, (tensor("x"),))))
    state, actions = step(state, [Submitted((tensor("a", 5),))])
    assert [type(each.message) for each in actions] == [m.Announce, m.Break]


def test_step_does_not_end_while_a_tensor_of_it_waits() -> None:
    state = _freezing_after_one_step()
    for requests in ("c", "a", "a"):
        found = tuple(map(tensor, requests))
        state, _ = step(state, [Submitted(found)])
        if requests == "a":
            state, _ = step(state, [Received(1, (m.Announce(0, found),))])
    assert state.mode is Mode.TALKING  # "a" has run twice; "c" still waits for rank 1
    c = (tensor("c"),)
    announced = Received(1, (m.Announce(0, c),))
    state, actions = step(state, [announced, Submitted(c), announced])
    assert state.mode is Mode.FROZEN
    adopted = next(each for each in actions if isinstance(each, Adopt))
    assert {name for bucket in adopted.buckets for name in bucket.names} == {"a", "c"}


def test_tensors_of_the_plan_are_no_stalls() -> None:
    state = _freezing_after_one_step()
    a = (tensor("a"),)
    state, _ = step(state, [Submitted(a), Received(1, (m.Announce(0, a),))] * 2)
    assert state.mode is Mode.FROZEN
    assert step(state, [WantsStalls()])[1][-1] == m.Stalls(())


def _freezing_after_one_step() -> State:
    state = State.first(rank=0, size=2)
    assert state.coordinator is not None
    state.coordinator.freezing.freeze_after = 1
    return state


def test_older_messages_change_nothing() -> None:
    state = State.first(rank=0, size=2)
    old = [m.Break(7, "no"), m.Stopped(7, 3), m.Join(7, True), m.Announce(7, (tensor("a"),))]
    after, actions = step(state, [Received(1, tuple(old))])
    assert actions == () and after == state


# ---- leaving the plan, and large numbers of tensors


def test_lost_rank_does_not_make_step_raise() -> None:
    state = State.first(rank=0, size=3)
    events = [Submitted((tensor("a"),)), Received(2, (m.Leave(), m.AskStalls(), m.Leave()))]
    events += [HasStopped(0), HasDrained(()), Received(1, (m.Stopped(0, 1), m.Leave())), Closes()]
    for position in range(len(events)):
        state, actions = step(state, events[position:] + events[:position])
        assert all(not isinstance(each, m.Run) for each in actions)


def test_stopping_ends_without_a_rank_that_left() -> None:
    state = State.first(rank=0, size=3)
    assert state.coordinator is not None
    state.coordinator.freezing.freeze_after = 1
    everyone = [Received(rank, (m.Announce(0, (tensor("a"),)),)) for rank in (1, 2)]
    announced = [Submitted((tensor("a"),)), *everyone]
    state, actions = step(state, announced * 2)
    assert state.mode is Mode.FROZEN
    stopped = [Received(1, (m.Break(1, "odd"),)), HasStopped(4), Received(2, (m.Stopped(2, 6),))]
    state, actions = step(state, stopped)
    assert m.Resume not in {type(each.message) for each in actions if isinstance(each, Send)}
    state, actions = step(state, [Received(1, (m.Leave(),))])
    assert Send(2, m.Resume(2, 6)) in actions


@pytest.mark.parametrize("batch", [10_000, 500])
def test_ten_thousand_names_are_agreed_on(batch: int) -> None:
    """Tests that ranks agree on ten thousand names, which takes some seconds. An algorithm that
    compares all pairs of names would time out.
    """
    requests = [tensor(f"layer{i}.weight") for i in range(10_000)]
    groups = [tuple(requests[i : i + batch]) for i in range(0, len(requests), batch)]
    state = State.first(rank=0, size=2)
    ran = 0
    for _ in range(2):
        for group in groups:
            state, _ = step(state, [Submitted(group)])
        for group in reversed(groups):
            state, actions = step(state, [Received(1, (m.Announce(0, group),))])
            ran += sum(len(each.bucket.names) for each in actions if isinstance(each, m.Run))
    assert ran == 2 * len(requests)
    state, _ = step(state, [Submitted(tuple(requests))])
    state, _ = step(state, [Received(1, (m.Announce(0, tuple(requests)),))])
    assert state.mode is Mode.FROZEN
