"""A ledger made of votes: never two groups, whatever is cut, dies and is stopped, in any order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballot_world import SpanningWorld
from unisono.links.vote import Ask, Step, Vote, cast
from unisono.runtime.agreement import undecided
from unisono.runtime.quorum import Poll, suffices


def play(ranks: int, data: st.DataObject) -> SpanningWorld:
    """Anything happens: at most one cut, some deaths and stops; then all that live end."""
    world = SpanningWorld(ranks)
    budget = {"die": data.draw(st.integers(0, ranks - 1)), "stop": 4, "cut": 1, "wait": 3}
    for _ in range(data.draw(st.integers(0, 200))):
        moves = world.moves()
        absent = [r for r in range(ranks) if r not in world.states and r not in world.dead]
        moves += [lambda rank=rank: world.come(rank) for rank in absent]
        kinds = ["move"] * 20 + [kind for kind, left in budget.items() if left]
        kind = data.draw(st.sampled_from(kinds))
        if kind in budget:
            budget[kind] -= 1
        match kind:
            case "move" if moves:
                data.draw(st.sampled_from(moves))()
            case "die":
                world.dead.add(data.draw(st.integers(0, ranks - 1)))
            case "stop":
                world.stopped ^= {data.draw(st.integers(0, ranks - 1))}
            case "cut":
                world.cut(data.draw(st.frozensets(st.integers(0, ranks - 1))))
            case "wait":
                world.now += data.draw(st.sampled_from([0.1, 4.0, 15.0]))
    world.settle()
    return world


def never_two_groups(ranks: int, data: st.DataObject) -> None:
    world = play(ranks, data)
    world.check()
    assert set(world.outcomes) | world.dead == set(range(ranks))


@settings(max_examples=60, deadline=None)
@given(ranks=st.integers(2, 5), data=st.data())
def test_never_two_groups(ranks: int, data: st.DataObject) -> None:
    never_two_groups(ranks, data)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=1000, deadline=None)
@given(ranks=st.integers(2, 5), data=st.data())
def test_at_length_never_two_groups(ranks: int, data: st.DataObject) -> None:
    never_two_groups(ranks, data)


def test_what_was_seen_before_an_order_does_not_repeat_it() -> None:
    world = SpanningWorld(3)
    for rank in range(3):
        world.come(rank)
    for rank in range(1, 3):
        world.look(rank)  # it reports
        world.act(rank)
    world.glance(0)
    for source in (1, 2):
        world.deliver(source, 0)
    while not world.states[0].ready:
        world.round()
    for rank in range(1, 3):
        world.act(rank)  # it reports what it has formed
    world.step(0, world.seen.pop(0))
    world.settle()
    assert world.check() == [0, 1, 2]
    assert len(world.meetings) == 1


@settings(max_examples=50, deadline=None)
@given(ranks=st.integers(1, 6), data=st.data())
def test_of_two_sides_the_right_one_goes_on(ranks: int, data: st.DataObject) -> None:
    side = data.draw(st.frozensets(st.integers(0, ranks - 1)))
    world = SpanningWorld(ranks)
    world.cut(side)
    world.settle()
    sides = [sorted(side), sorted(set(range(ranks)) - side)]
    assert world.check() == max(sides, key=lambda one: (len(one), 0 in one))


@settings(max_examples=50, deadline=None)
@given(ranks=st.integers(1, 6), data=st.data())
def test_all_who_live_go_on_if_the_others_have_ended(ranks: int, data: st.DataObject) -> None:
    world = SpanningWorld(ranks)
    world.dead |= data.draw(st.frozensets(st.integers(0, ranks - 1)))
    world.settle()
    assert world.check() == sorted(set(range(ranks)) - world.dead)


@given(st.integers(1, 7), st.data())
def test_two_sets_that_suffice_have_a_rank_in_common(ranks: int, data: st.DataObject) -> None:
    some = st.frozensets(st.integers(0, ranks - 1))
    one, other, voters = data.draw(some), data.draw(some), set(range(ranks))
    if suffices(one, set(), voters) and suffices(other, set(), voters):
        assert one & other


def begin_poll(rank: int, ballot: int) -> Poll:
    """Of three ranks, one that wants to move the ledger to this ballot."""
    return Poll(rank, {0, 1, 2}, undecided(0), undecided(ballot))


def hold(poll: Poll, votes: dict[int, Vote]) -> list[Ask]:
    """Lets a poll run to its end with the votes that can be reached; returns all its questions."""
    asked = []
    while poll.seen is None:
        assert poll.asks, "it waits for more votes"
        to, ask = poll.asks.pop(0)
        if to in votes:
            votes[to], answer = cast(votes[to], ask)
            asked.append(ask)
            poll.hear(to, answer)
            poll.settle(set())
    return asked


def choose(ballot: int, votes: dict[int, Vote], ranks: list[int]) -> None:
    """Some votes are told to choose the group formed under a ballot, by rank 1, which then dies."""
    for rank in ranks:
        ask = Ask(step=Step.CHOOSE, rank=1, ballot=ballot, choice=ballot)
        votes[rank], answer = cast(votes[rank], ask)
        assert answer.yes


@pytest.mark.parametrize("chosen_by", [[1, 2], [2]])
def test_a_ballot_adopts_the_choice_that_it_finds(chosen_by: list[int]) -> None:
    """Two of three votes have decided, but one of them is gone: who asks the others cannot tell."""
    votes = {rank: Vote() for rank in range(3)}
    choose(5, votes, chosen_by)
    del votes[1]
    poll = begin_poll(0, 7)
    asked = hold(poll, votes)
    assert {(ask.ballot, ask.choice) for ask in asked if ask.step is Step.CHOOSE} == {(7, 5)}
    assert poll.decision is not None
    assert poll.decision.choice == 5
    assert poll.seen == undecided(5) + 1
    assert {vote.choice for vote in votes.values()} == {5}


def test_a_ballot_adopts_the_latest_of_several_choices() -> None:
    votes = {rank: Vote() for rank in range(3)}
    choose(5, votes, [0])
    choose(6, votes, [2])  # the later one may be decided, with the vote that is gone
    del votes[1]
    poll = begin_poll(0, 7)
    hold(poll, votes)
    assert poll.decision is not None
    assert poll.decision.choice == 6


def test_a_ballot_that_finds_no_choice_leaves_the_ledger_to_its_own() -> None:
    votes = {rank: Vote() for rank in range(3)}
    poll = begin_poll(0, 7)
    asked = hold(poll, votes)
    assert {ask.step for ask in asked} == {Step.PROMISE}
    assert poll.decision is None
    assert poll.seen == undecided(0)
