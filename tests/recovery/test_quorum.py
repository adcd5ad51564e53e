"""Recovery by the votes of several hosts never forms two groups, for all orders of cuts between
hosts, deaths and stops.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery_ranks import WorldOfHosts
from unisono.rank_connections.paxos_acceptor import Vote, VotePhase, VoteRequest, cast, cast_in
from unisono.recovery.membership_agreement import undecided
from unisono.recovery.quorum import Poll, entry_of, suffices

LAYOUTS = st.lists(st.integers(0, 4), min_size=1, max_size=6)
"""The host of each rank."""


def play(layout: Sequence[int], data: st.DataObject) -> WorldOfHosts:
    """Runs random events: cuts, pairs of hosts that refuse connections, deaths and stops. A rank
    that gave up tries again. At the end, all live ranks finish.
    """
    world, ranks = WorldOfHosts(layout), len(layout)
    some = st.integers(0, ranks - 1)
    deaths = data.draw(st.integers(0, ranks - 1))
    budget = {"die": deaths, "stop": 4, "cut": 2, "sever": 4, "wait": 3, "again": 2}
    for _ in range(data.draw(st.integers(0, 200))):
        moves = world.moves()
        absent = [r for r in range(ranks) if r not in world.states and r not in world.dead]
        moves += [lambda rank=rank: world.start(rank) for rank in absent]
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
                for rank in filter(world.can_start_again, range(ranks)):
                    world.start(rank)
    world.settle()
    return world


def never_two_groups(layout: Sequence[int], data: st.DataObject) -> None:
    world = play(layout, data)
    world.check()  # checks all ranks that ever finished, including dead ranks
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


def test_an_old_observation_does_not_repeat_an_order() -> None:
    world = WorldOfHosts([0, 1, 2])
    for rank in range(3):
        world.start(rank)
    for rank in range(1, 3):
        world.observe(rank)  # the rank sends its report
        world.act(rank)
    world.observe_late(0)
    for source in (1, 2):
        world.deliver(source, 0)
    while not world.states[0].ready:
        world.round()
    for rank in range(1, 3):
        world.act(rank)  # the rank reports the group that it has formed
    world.step(0, world.seen.pop(0))
    world.settle()
    assert world.check() == [0, 1, 2]
    assert len(world.formings) == 1


@settings(max_examples=100, deadline=None)
@given(layout=LAYOUTS, data=st.data())
def test_the_larger_side_of_a_cut_decides(layout: Sequence[int], data: st.DataObject) -> None:
    """Tests that the side with more than half of the ranks forms the group, or the side of rank 0's
    host if both sides are equal. A host with a live rank counts with all its ranks, also dead ones.
    If ranks died before the cut, perhaps neither side has enough ranks.
    """
    some = st.frozensets(st.integers(0, len(layout) - 1))
    world = WorldOfHosts(layout)
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
def test_excluded_ranks_need_not_reply(layout: Sequence[int], data: st.DataObject) -> None:
    some = st.frozensets(st.integers(0, len(layout) - 1))
    dead = data.draw(some)
    world = WorldOfHosts(layout, exclude=dead)
    world.dead |= dead
    world.settle()
    assert world.check() == sorted(set(range(len(layout))) - dead)


@given(st.integers(1, 7), st.data())
def test_two_sufficient_sets_share_a_rank(ranks: int, data: st.DataObject) -> None:
    some = st.frozensets(st.integers(0, ranks - 1))
    one, other, voters = data.draw(some), data.draw(some), set(range(ranks))
    if suffices(one, voters) and suffices(other, voters):
        assert one & other


def begin_poll(ballot: int) -> Poll:
    """Begins a poll of three hosts, which would change the ledger to this ballot (a numbered
    attempt to form a group).
    """
    return Poll([{0}, {1}, {2}], undecided(0), undecided(ballot))


def run_poll(poll: Poll, votes: dict[int, Vote]) -> list[VoteRequest]:
    """Runs a poll to its end with the reachable votes, and returns its requests."""
    requests: list[VoteRequest] = []
    while poll.seen is None:
        assert poll.request not in requests, "it waits for more votes"
        requests.append(poll.request)
        for rank, vote in list(votes.items()):
            votes[rank], reply = cast(vote, requests[-1])
            poll.handle(rank, reply)
    return requests


def choose(ballot: int, votes: dict[int, Vote], ranks: list[int]) -> None:
    """Makes some votes choose the group of this ballot (a numbered attempt to form a group), as
    rank 1 does before it dies.
    """
    for rank in ranks:
        request = VoteRequest(phase=VotePhase.CHOOSE, ballot=ballot, choice=ballot)
        votes[rank], reply = cast(votes[rank], request)
        assert reply.yes


@pytest.mark.parametrize("chosen_by", [[1, 2], [2]])
def test_a_ballot_adopts_the_choice_that_it_finds(chosen_by: list[int]) -> None:
    """Tests that a new ballot proposes the group of an earlier ballot again, if that ballot may
    have decided on the group. Vote 2, and in one case vote 1, chose the group. After vote 1 is
    lost, the other two cannot show whether the group had a majority.
    """
    votes = {rank: Vote() for rank in range(3)}
    choose(5, votes, chosen_by)
    del votes[1]
    poll = begin_poll(7)
    requests = run_poll(poll, votes)
    assert {
        (request.ballot, request.choice)
        for request in requests
        if request.phase is VotePhase.CHOOSE
    } == {(7, 5)}
    assert poll.decision is not None
    assert poll.decision.choice == 5
    assert poll.seen == undecided(5) + 1
    assert {vote.choice for vote in votes.values()} == {5}


def test_a_ballot_adopts_the_latest_of_several_choices() -> None:
    votes = {rank: Vote() for rank in range(3)}
    choose(5, votes, [0])
    choose(6, votes, [2])  # choice 6 may have a majority, together with the lost vote
    del votes[1]
    poll = begin_poll(7)
    run_poll(poll, votes)
    assert poll.decision is not None
    assert poll.decision.choice == 6


def test_a_ballot_that_finds_no_choice_moves_the_ledger_to_itself() -> None:
    votes = {rank: Vote() for rank in range(3)}
    poll = begin_poll(7)
    requests = run_poll(poll, votes)
    assert {request.phase for request in requests} == {VotePhase.PROMISE}
    assert poll.decision is None
    assert poll.seen == undecided(0)


def test_a_decision_counts_despite_later_promises() -> None:
    vote, _ = cast(Vote(), VoteRequest(phase=VotePhase.PROMISE, ballot=9))
    vote, _ = cast(vote, VoteRequest(phase=VotePhase.DECIDED, ballot=7, choice=5))
    assert entry_of(vote) == undecided(5) + 1
    assert vote.promised == 9


def test_a_vote_changed_meanwhile_is_cast_again() -> None:
    word = 0

    def exchange(expected: int, desired: int) -> int:
        nonlocal word
        seen = word
        if seen == expected:
            word = desired
        if expected == desired:  # a read, after which another request changes the word
            word = cast(Vote(), VoteRequest(phase=VotePhase.PROMISE, ballot=8))[0].word
        return seen

    reply = cast_in(exchange, VoteRequest(phase=VotePhase.PROMISE, ballot=7))
    assert not reply.yes
    assert Vote.of(word).promised == 8
