"""A ledger made of votes: never two groups, whatever is cut, dies and is stopped, in any order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery_ranks import SpanningWorld
from unisono.control.vote import Vote, VotePhase, VoteRequest, cast, cast_in
from unisono.recovery.agreement import undecided
from unisono.recovery.quorum import Poll, entry_of, suffices

LAYOUTS = st.lists(st.integers(0, 4), min_size=1, max_size=6)
"""The host of each rank."""


def play(layout: Sequence[int], data: st.DataObject) -> SpanningWorld:
    """Anything happens: cuts, pairs that see each other refused, some deaths and stops; who gave up
    tries again. Then all that live end."""
    world, ranks = SpanningWorld(layout), len(layout)
    some = st.integers(0, ranks - 1)
    deaths = data.draw(st.integers(0, ranks - 1))
    budget = {"die": deaths, "stop": 4, "cut": 2, "sever": 4, "wait": 3, "again": 2}
    for _ in range(data.draw(st.integers(0, 200))):
        moves = world.moves()
        absent = [r for r in range(ranks) if r not in world.states and r not in world.dead]
        moves += [lambda rank=rank: world.come(rank) for rank in absent]
        moves += [lambda r=r: world.leave(r) for r in world.outcomes.keys() - world.left.keys()]
        kinds = ["move"] * 20 + [kind for kind, left in budget.items() if left]
        kind = data.draw(st.sampled_from(kinds))
        if kind in budget:
            budget[kind] -= 1
        match kind:
            case "move" if moves:
                data.draw(st.sampled_from(moves))()
            case "die":
                world.dead.add(data.draw(some))
            case "stop":
                world.stopped ^= {data.draw(some)}
            case "cut":
                world.cut(data.draw(st.frozensets(some)))
            case "sever":
                world.sever(data.draw(some), data.draw(some))
            case "wait":
                world.now += data.draw(st.sampled_from([0.1, 4.0, 15.0]))
            case "again":
                for rank in filter(world.can_come_again, range(ranks)):
                    world.come(rank)
    world.settle()
    return world


def never_two_groups(layout: Sequence[int], data: st.DataObject) -> None:
    world = play(layout, data)
    world.check()  # of all that ever went on, the dead too
    assert set(world.outcomes) | world.dead == set(range(len(layout)))


@settings(max_examples=100, deadline=None)
@given(layout=LAYOUTS, data=st.data())
def test_never_two_groups(layout: Sequence[int], data: st.DataObject) -> None:
    never_two_groups(layout, data)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=1500, deadline=None)
@given(layout=LAYOUTS, data=st.data())
def test_at_length_never_two_groups(layout: Sequence[int], data: st.DataObject) -> None:
    never_two_groups(layout, data)


def test_what_was_seen_before_an_order_does_not_repeat_it() -> None:
    world = SpanningWorld([0, 1, 2])
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


@settings(max_examples=100, deadline=None)
@given(layout=LAYOUTS, data=st.data())
def test_of_two_sides_the_right_one_goes_on(layout: Sequence[int], data: st.DataObject) -> None:
    """A host counts with all its ranks where one of them lives. With deaths before a cut it may be
    that neither side has enough."""
    some = st.frozensets(st.integers(0, len(layout) - 1))
    world = SpanningWorld(layout)
    world.dead |= data.draw(some)
    first = data.draw(some)
    world.cut(first)
    world.settle()
    hosts = {layout[rank] for rank in first}
    right = []
    for side in (
        [r for r in range(len(layout)) if (layout[r] in hosts) is here] for here in (False, True)
    ):
        living = [rank for rank in side if rank not in world.dead]
        alive = {layout[rank] for rank in living}
        count = sum(2 for rank in side if layout[rank] in alive) - len(layout)
        if count > 0 or (count == 0 and layout[0] in alive):
            right += living
    assert world.check() == right


@settings(max_examples=50, deadline=None)
@given(layout=LAYOUTS, data=st.data())
def test_who_is_excluded_need_not_answer(layout: Sequence[int], data: st.DataObject) -> None:
    some = st.frozensets(st.integers(0, len(layout) - 1))
    dead = data.draw(some)
    world = SpanningWorld(layout, exclude=dead)
    world.dead |= dead
    world.settle()
    assert world.check() == sorted(set(range(len(layout))) - dead)


@given(st.integers(1, 7), st.data())
def test_two_sets_that_suffice_have_a_rank_in_common(ranks: int, data: st.DataObject) -> None:
    some = st.frozensets(st.integers(0, ranks - 1))
    one, other, voters = data.draw(some), data.draw(some), set(range(ranks))
    if suffices(one, voters) and suffices(other, voters):
        assert one & other


def begin_poll(ballot: int) -> Poll:
    """Of three hosts, that wants to move the ledger to this ballot."""
    return Poll([{0}, {1}, {2}], undecided(0), undecided(ballot))


def hold(poll: Poll, votes: dict[int, Vote]) -> list[VoteRequest]:
    """Lets a poll run to its end with the votes that can be reached; returns all its questions."""
    asked: list[VoteRequest] = []
    while poll.seen is None:
        assert poll.ask not in asked, "it waits for more votes"
        asked.append(poll.ask)
        for rank, vote in list(votes.items()):
            votes[rank], answer = cast(vote, asked[-1])
            poll.hear(rank, answer)
    return asked


def choose(ballot: int, votes: dict[int, Vote], ranks: list[int]) -> None:
    """Some votes are told to choose the group formed under a ballot, by rank 1, which then dies."""
    for rank in ranks:
        ask = VoteRequest(step=VotePhase.CHOOSE, ballot=ballot, choice=ballot)
        votes[rank], answer = cast(votes[rank], ask)
        assert answer.yes


@pytest.mark.parametrize("chosen_by", [[1, 2], [2]])
def test_a_ballot_adopts_the_choice_that_it_finds(chosen_by: list[int]) -> None:
    """Two of three votes have decided, but one of them is gone: who asks the others cannot tell."""
    votes = {rank: Vote() for rank in range(3)}
    choose(5, votes, chosen_by)
    del votes[1]
    poll = begin_poll(7)
    asked = hold(poll, votes)
    assert {(ask.ballot, ask.choice) for ask in asked if ask.step is VotePhase.CHOOSE} == {(7, 5)}
    assert poll.decision is not None
    assert poll.decision.choice == 5
    assert poll.seen == undecided(5) + 1
    assert {vote.choice for vote in votes.values()} == {5}


def test_a_ballot_adopts_the_latest_of_several_choices() -> None:
    votes = {rank: Vote() for rank in range(3)}
    choose(5, votes, [0])
    choose(6, votes, [2])  # the later one may be decided, with the vote that is gone
    del votes[1]
    poll = begin_poll(7)
    hold(poll, votes)
    assert poll.decision is not None
    assert poll.decision.choice == 6


def test_a_ballot_that_finds_no_choice_leaves_the_ledger_to_its_own() -> None:
    votes = {rank: Vote() for rank in range(3)}
    poll = begin_poll(7)
    asked = hold(poll, votes)
    assert {ask.step for ask in asked} == {VotePhase.PROMISE}
    assert poll.decision is None
    assert poll.seen == undecided(0)


def test_a_decision_is_known_whatever_was_promised_since() -> None:
    vote, _ = cast(Vote(), VoteRequest(step=VotePhase.PROMISE, ballot=9))
    vote, _ = cast(vote, VoteRequest(step=VotePhase.KNOW, ballot=7, choice=5))
    assert entry_of(vote) == undecided(5) + 1
    assert vote.promised == 9


def test_a_vote_that_another_moves_meanwhile_is_cast_again() -> None:
    word = 0

    def exchange(expected: int, desired: int) -> int:
        nonlocal word
        seen = word
        if seen == expected:
            word = desired
        if expected == desired:  # between the look and the move
            word = cast(Vote(), VoteRequest(step=VotePhase.PROMISE, ballot=8))[0].word
        return seen

    answer = cast_in(exchange, VoteRequest(step=VotePhase.PROMISE, ballot=7))
    assert not answer.yes
    assert Vote.of(word).promised == 8
