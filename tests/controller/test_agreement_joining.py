"""Ranks that join, ask which tensors wait, or leave, in a simulated world."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.simulated_rank import Ask, Close, Command, JoinAll, Submit, Wait
from controller.world import World, step_of
from unisono.controller import messages as m
from unisono.controller.agreement import State, step
from unisono.controller.fusion.buckets import Bucket
from unisono.controller.rank_state import Received, Submitted
from unisono.controller.request import Request
from unisono.errors import PeerLostError, UnisonoError
from unisono.types import DType

SEEDS = range(8)


def worlds(*programs: list[Command], **options: object) -> list[World]:
    """Returns worlds in which the programs ran, with different delays in each world."""
    return [World(programs, **options).run_at_random(seed) for seed in SEEDS]


def runs_of(world: World, rank: int = 1) -> list[m.Run]:
    return [each for each in world.ranks[rank].decisions if isinstance(each, m.Run)]


# ---- joining


@pytest.mark.parametrize("over_all", [True, False])
@pytest.mark.parametrize("steps", [1, 6])
def test_ranks_go_on_without_one_that_joined(over_all: bool, steps: int) -> None:
    usual = step_of("ab", op="avg")
    long = [*(usual * (steps + 3)), JoinAll(over_all)]
    short = [*(usual * steps), JoinAll(over_all)]
    for world in worlds(long, short, long):
        assert len(world.ranks[1].outcomes) == 2 * steps
        alone = [run for run in runs_of(world) if run.active == (0, 2)]
        assert sum(len(run.bucket.names) for run in alone) == 3 * 2
        assert all(run.average_over_all == over_all for run in alone)
        assert {rank.last_joined for rank in world.ranks} <= {0, 2}


def test_program_goes_on_after_all_have_joined() -> None:
    usual = step_of("ab")
    programs = [[*(usual * count), JoinAll(), *(usual * 8), JoinAll()] for count in (3, 5, 4)]
    for world in worlds(*programs):
        joined = [each for each in world.ranks[0].decisions if isinstance(each, m.Joined)]
        assert len(joined) == 2
        assert len({rank.last_joined for rank in world.ranks}) == 1


def test_rank_that_joined_gathers_no_rows() -> None:
    gather = step_of("g", shape=(4, 3), operation="all_gather")
    for world in worlds([*gather, *gather, JoinAll()], [*gather, JoinAll()]):
        assert [run.lengths for run in runs_of(world)] == [(4, 4), (4, 0)]


def test_broadcast_needs_its_root() -> None:
    def cast(root: int) -> list[Command]:
        return step_of("w", operation="broadcast", root=root)

    for root, refused in ((0, False), (1, True)):
        for world in worlds([*cast(root), *cast(root), JoinAll()], [*cast(root), JoinAll()]):
            text = world.texts(0).get("w", "")
            assert (text == "tensor 'w': rank 1 joined and cannot take part as the root of "
                    "a broadcast") == refused  # fmt: skip
            assert len(world.ran()) == 2 - refused


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_to_all"])
def test_shares_of_a_rank_that_joined_are_refused(operation: str) -> None:
    usual, odd = step_of("a"), step_of("s", operation=operation)
    rest = [JoinAll(), *step_of("t", operation=operation), JoinAll()]
    for world in worlds([*usual, *odd, *usual, *rest], [*usual, *rest], [*usual, *rest]):
        assert f"ranks 1 and 2 joined and cannot take part in {operation}" in world.texts(0)["s"]
        assert world.ran() == [("a",), ("a",), ("t",)]


def test_refused_member_of_a_group_refuses_the_others_while_joined() -> None:
    group = ("a", "s")
    both = [Submit("a", group=group), Submit("s", operation="all_to_all", group=group)]
    for world in worlds([*both, Wait("a"), Wait("s"), JoinAll()], [JoinAll()]):
        assert world.texts(0).keys() == {"a", "s"} and world.ran() == []


def test_rank_joins_before_its_tensors_have_run() -> None:
    """Tests that two tensors are not fused if different ranks are active for them, though both
    tensors are ready at the same time.
    """
    short = [Submit("a"), JoinAll(), Wait("a")]
    long = [Submit("a"), Submit("b"), Wait("a"), Wait("b"), JoinAll()]
    for world in worlds(long, short, long):
        active = {name: run.active for run in runs_of(world) for name in run.bucket.names}
        assert active == {"a": (0, 1, 2), "b": (0, 2)}


def test_tensors_of_other_active_ranks_share_no_message() -> None:
    a, b = (Request(name=x, operation="all_reduce", dtype=DType.FLOAT32, shape=(2,)) for x in "ab")
    events = [
        Submitted((a, b)),
        Received(1, (m.Announce(0, (a,)), m.Join(0, False))),
        Received(2, (m.Announce(0, (a, b)),)),
    ]
    _, actions = step(State.first(rank=0, size=3), events)
    runs = [each for each in actions if isinstance(each, m.Run)]
    assert [(run.bucket.names, run.active) for run in runs] == [
        (("a",), (0, 1, 2)),
        (("b",), (0, 2)),
    ]


def test_tensor_of_joined_ranks_alone_runs() -> None:
    for world in worlds([Submit("a"), JoinAll(), Wait("a")], [JoinAll()], [JoinAll()]):
        assert [run.active for run in runs_of(world)] == [(0,)]


def test_broadcast_of_a_root_that_joined_later_runs() -> None:
    cast = Submit("w", operation="broadcast", root=0)
    for world in worlds([cast, JoinAll(), Wait("w")], [cast, Wait("w"), JoinAll()]):
        assert world.ran() == [("w",)]


# ---- tensors that wait


def test_stalls_name_the_ranks() -> None:
    world = World([[Submit("a"), Wait("a")], [Submit("z"), Ask()], [Submit("z"), Submit("a")]])
    world.ranks[0].program = (Submit("a"),)
    while moves := [move for move in world.moves() if move[1] != 1 or move[0] == "queue"]:
        world.move(moves[0])
    world.now_s = 12.5
    while moves := world.moves():
        world.move(moves[0])
    found = {each.name: (each.present, each.missing) for each in world.ranks[1].stalls[0]}
    assert found == {"a": ((0, 2), (1,)), "z": ((1, 2), (0,))}
    assert {each.name: each.waited_s for each in world.ranks[1].stalls[0]} == {"a": 12.5, "z": 12.5}


def test_stalls_are_answered_while_frozen() -> None:
    usual = step_of("ab")
    late = [*(usual * 4), Submit("a"), Ask(), Submit("b"), Wait("a"), Wait("b"), *(usual * 8)]
    for world in worlds(late, usual * 13, usual * 13):
        assert world.frozen and len(world.ranks[0].stalls) >= 1


# ---- leaving


def test_close_ends_the_waits_of_other_ranks() -> None:
    usual = step_of("ab")
    for steps in (1, 5):
        for world in worlds(usual * (steps + 2), [*(usual * steps), Close()], usual * (steps + 2)):
            assert isinstance(world.ranks[0].error, PeerLostError)
            assert "rank 1" in str(world.ranks[2].error)


def test_close_of_all_ends_well() -> None:
    for world in worlds(*[[*(step_of("ab") * 4), Close()]] * 3):
        assert sum(map(len, world.ran())) == 8


# ---- messages

names = st.text(max_size=5)
numbers = st.integers(-(2**40), 2**40)
ranks = st.lists(st.integers(0, 9), max_size=4).map(tuple)
requests = st.builds(
    Request,
    name=names,
    operation=names,
    dtype=st.sampled_from(DType),
    shape=ranks,
    op=names,
    root=numbers,
    group=st.lists(names, max_size=3).map(tuple),
    priority=numbers,
    phase=numbers,
)
buckets = st.builds(Bucket, st.lists(requests, max_size=3).map(tuple))
stalls = st.builds(m.Stalled, names, ranks, ranks, st.floats(0, 1e9))
messages = st.one_of(
    st.builds(m.Announce, numbers, st.lists(requests, max_size=3).map(tuple)),
    st.builds(m.Break, numbers, names),
    st.builds(m.Stopped, numbers, numbers),
    st.builds(m.Join, numbers, st.booleans()),
    st.just(m.Leave()),
    st.just(m.AskStalls()),
    st.builds(m.Run, buckets, ranks, st.booleans(), ranks),
    st.builds(m.Refuse, names, names),
    st.builds(m.Freeze, numbers, st.lists(buckets, max_size=3).map(tuple)),
    st.builds(m.Thaw, numbers, names),
    st.builds(m.Resume, numbers, numbers),
    st.builds(m.Joined, numbers, numbers),
    st.builds(m.Left, numbers),
    st.builds(m.Stalls, st.lists(stalls, max_size=3).map(tuple)),
)


@settings(max_examples=40)
@given(st.lists(messages, max_size=4).map(tuple))
def test_messages_are_the_same_once_decoded(sent: tuple[m.Message, ...]) -> None:
    assert m.decode(m.encode(sent)) == sent


@pytest.mark.parametrize("text", [b"", b"{", b"[3]", b'[["Run"]]', b'[["Odd", 1]]', b"\xff", b"7"])
def test_decode_refuses_what_is_no_message(text: bytes) -> None:
    with pytest.raises(UnisonoError, match="expected messages of a controller"):
        m.decode(text)
