"""The parts of the parameter server without communication: ranges, plans, and the state machine of
pushes.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("torch")

from unisono.parallel.parameter_server.byte_ranges import (
    ByteLayout,
    ByteRange,
    TensorSpec,
)
from unisono.parallel.parameter_server.range_state import Apply, RangeState, Reply
from unisono.parallel.parameter_server.server_plan import (
    ServerPlan,
    choose_servers,
)

pytestmark = pytest.mark.torch

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


def _spec(name: str, count: int, dtype: str) -> TensorSpec:
    return TensorSpec(name=name, count=count, dtype=dtype, item_bytes=ITEM_BYTES[dtype])


tensors = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(sorted(ITEM_BYTES))), min_size=1)


# ---- ranges


@given(tensors, st.integers(1, 6), st.integers(1, 64))
def test_ranges_cover_every_element_once(
    given_tensors: list[tuple[int, str]], servers: int, range_bytes: int
) -> None:
    specs = [_spec(f"t{i}", count, dtype) for i, (count, dtype) in enumerate(given_tensors)]
    layout = ByteLayout(specs)
    assert layout.nbytes == sum(spec.nbytes for spec in specs)
    try:
        shards = layout.divide(layout.whole, servers)
    except ValueError:
        # too few elements for the servers: an element has at most 8 bytes
        assert layout.nbytes < servers * 8 + 8
        return
    seen = [set[int]() for _ in specs]
    end = 0
    for shard in shards:
        assert abs(shard.nbytes - layout.nbytes / servers) < 8
        for within in layout.ranges(shard, range_bytes):
            assert within.start == end
            end = within.stop
            assert 0 < within.nbytes < range_bytes + 16
            for piece in layout.pieces(within):
                spec = specs[piece.tensor]
                assert piece.start % spec.item_bytes == 0
                assert piece.start == layout.starts[piece.tensor] + piece.first * spec.item_bytes
                assert within.start <= piece.start
                assert piece.start + piece.count * spec.item_bytes <= within.stop
                elements = set(range(piece.first, piece.first + piece.count))
                assert not elements & seen[piece.tensor]
                seen[piece.tensor] |= elements
    assert end == layout.nbytes
    assert [len(elements) for elements in seen] == [spec.count for spec in specs]


def test_equal_bytes_where_they_divide() -> None:
    layout = ByteLayout([_spec("a", 10, "float32"), _spec("b", 22, "float32")])
    assert [shard.nbytes for shard in layout.divide(layout.whole, 4)] == [32] * 4
    assert layout.describe(ByteRange(start=32, stop=64)) == "bytes 32 to 64 (a to b)"
    assert layout.describe(ByteRange(start=64, stop=72)) == "bytes 64 to 72 (b)"


def test_more_servers_than_elements_are_refused() -> None:
    layout = ByteLayout([_spec("a", 3, "float32")])
    with pytest.raises(ValueError, match="at least one element for each of 4 servers, found 12"):
        layout.divide(layout.whole, 4)


# ---- plans


def _plan(size: int, servers: int, dedicated: bool, total: int) -> ServerPlan:
    owners = choose_servers(size, servers, dedicated=dedicated)
    workers = tuple(rank for rank in range(size) if not dedicated or rank not in owners)
    layout = ByteLayout([_spec("a", total, "uint8")])
    return ServerPlan(
        workers=workers, owners=owners, shards=layout.divide(layout.whole, len(owners))
    )


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 50))
def test_traffic_is_the_closed_form(n: int, s: int, unit: int) -> None:
    total = unit * s
    dedicated = _plan(n + s, s, True, total)
    for rank in range(n + s):
        traffic = dedicated.traffic(rank)
        expected = total if rank < n else n * total // s
        assert traffic.sent_bytes == traffic.received_bytes == expected
    if s <= n:
        colocated = _plan(n, s, False, total)
        for rank in range(n):
            traffic = colocated.traffic(rank)
            expected = (n + s - 2) * total // s if rank in colocated.owners else total
            assert traffic.sent_bytes == traffic.received_bytes == expected
        if s == n:  # the same bytes as a ring all_reduce
            assert colocated.traffic(0).sent_bytes == 2 * (n - 1) * total // n


def test_servers_are_chosen_and_refused() -> None:
    assert choose_servers(8, 3, dedicated=False) == (0, 2, 5)
    assert choose_servers(4, [2, 1], dedicated=True) == (2, 1)
    for servers, dedicated in ((0, False), (5, False), (4, True), ([1, 1], False), ([4], False)):
        with pytest.raises(ValueError, match="servers: expected"):
            choose_servers(4, servers, dedicated=dedicated)
    with pytest.raises(ValueError, match="expected a rank that works"):
        choose_servers(2, [0, 1], dedicated=True)


def test_a_lost_shard_goes_to_the_server_that_reads_the_newest_snapshot() -> None:
    plan = _plan(6, 3, True, 90)  # workers are ranks 0 to 2, servers are ranks 3 to 5
    left = [0, 1, 2, 3, 4]
    assert plan.without([5], left, {2: {0: 9, 3: 4, 4: 8}}).owners == (3, 4, 4)
    assert plan.without([5], left, {2: {3: 8, 4: 8}}).owners == (3, 4, 3)
    # only worker 1 can read a snapshot of shard 2
    assert plan.without([5], left, {2: {1: 8}}).owners == (3, 4, 1)
    both = plan.without([4, 5], [0, 1, 2, 3], {1: {3: 2}, 2: {3: 2}})
    assert both.owners == (3, 3, 3)
    none_left = plan.without([3, 4, 5], [0, 1, 2], {i: {0: 1, 1: 1, 2: 1} for i in range(3)})
    assert sorted(none_left.owners) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"no rank of \[0, 1, 2, 3, 4\] can read a snapshot"):
        plan.without([5], left, {2: {}})
    fewer = plan.without([1], [0, 2, 3, 4, 5], {})
    assert (fewer.workers, fewer.owners) == ((0, 2), plan.owners)


# ---- the state machine of pushes


class PushMachine(RuleBasedStateMachine):
    """Workers that push, repeat pushes, are lost, and continue after failures, in any order."""

    @initialize(n=st.integers(1, 5), staleness=st.sampled_from([0, 1, 2, 3, None]))
    def begin(self, n: int, staleness: int | None) -> None:
        self.n = n
        self.staleness = staleness
        self.state: RangeState[str] = RangeState(dict.fromkeys(range(n), 0), staleness=staleness)
        self.done = dict.fromkeys(range(n), 0)  # number of steps that each worker has pushed
        self.waits: dict[int, int] = {}  # the push for which each worker waits
        self.open = Counter[tuple[int, int]]()  # number of pushes without a reply
        self.applied: list[tuple[int, int]] = []

    def take(self, actions: list[object]) -> None:
        replied = False
        for action in actions:
            if isinstance(action, Apply):
                assert not replied, "an update after a reply would change what is being sent"
                self.check_update(action)
            else:
                assert isinstance(action, Reply)
                replied = True
                self.check_reply(action)

    def check_update(self, update: Apply[str]) -> None:
        workers = [worker for worker, _ in update.gradients]
        assert workers == sorted(workers)
        for worker, gradient in update.gradients:
            assert gradient == f"{worker}:{update.step}", "the first push counts"
            assert worker in self.done
            assert (worker, update.step) not in self.applied
            self.applied.append((worker, update.step))
        if self.staleness == 0:
            assert all(done > update.step for done in self.done.values())
            assert set(workers) == set(self.done)
        else:
            assert len(workers) == 1

    def check_reply(self, reply: Reply) -> None:
        self.open[reply.worker, reply.step] -= 1
        assert self.open[reply.worker, reply.step] >= 0, "each push gets one reply"
        if self.waits.get(reply.worker) == reply.step:
            del self.waits[reply.worker]
        least = min(self.done.values())
        others = len(self.done) - 1
        if self.staleness is None:
            return
        assert reply.step + 1 - least <= self.staleness
        assert reply.missed <= self.staleness * others
        if self.staleness and self.done[reply.worker] == reply.step + 1:
            assert reply.early <= (self.staleness + 1) * others
        missed = sum(
            (worker, step) not in self.applied
            for worker in self.done
            for step in range(reply.step + 1)
            if worker != reply.worker
        )
        assert reply.missed == missed
        if self.staleness == 0 and self.done[reply.worker] == reply.step + 1:
            assert (reply.missed, reply.early) == (0, 0)

    def ready(self) -> list[int]:
        return [worker for worker in self.done if worker not in self.waits]

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.ready()))
        step = self.done[worker]
        self.done[worker] += 1
        self.waits[worker] = step
        self.open[worker, step] += 1
        self.take(self.state.push(worker, step, f"{worker}:{step}"))

    @precondition(lambda self: any(self.done.values()))
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([w for w, done in self.done.items() if done]))
        step = data.draw(st.integers(0, self.done[worker] - 1))
        before = list(self.applied)
        self.open[worker, step] += 1
        self.take(self.state.push(worker, step, "another value"))
        assert self.applied == before

    @precondition(lambda self: len(self.done) > 1)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.done)))
        self.forget(worker)
        self.take(self.state.remove(worker))
        with pytest.raises(ValueError, match="has finished or was lost"):
            self.state.push(worker, 0, "late")

    def forget(self, worker: int) -> None:
        del self.done[worker]
        self.waits.pop(worker, None)
        self.open = Counter({key: count for key, count in self.open.items() if key[0] != worker})

    @precondition(lambda self: self.done)
    @rule(data=st.data())
    def fail_and_go_on(self, data: st.DataObject) -> None:
        lost = data.draw(st.sampled_from([None, *self.done])) if len(self.done) > 1 else None
        if lost is not None:
            self.forget(lost)
        again, self.waits = self.waits, {}
        self.open.clear()
        self.take(self.state.restart(list(self.done)))
        for worker, step in again.items():
            self.waits[worker] = step
            self.open[worker, step] += 1
            before = self.applied.count((worker, step))
            self.take(self.state.push(worker, step, "repeated"))
            assert self.applied.count((worker, step)) in (before, 1)

    @precondition(lambda self: self.done)
    @rule(data=st.data())
    def skip_a_step(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.done)))
        next_step = self.done[worker]
        with pytest.raises(ValueError, match=f"expected a push of step {next_step}, found"):
            self.state.push(worker, next_step + 1, "too early")

    @invariant()
    def somebody_can_go_on(self) -> None:
        if getattr(self, "done", None):
            assert self.ready(), "all workers wait"
            least = min(self.done.values())
            for worker, step in +self.open:
                assert self.staleness is not None
                assert step + 1 - least > self.staleness, f"worker {worker} waits for nothing"
            for worker, done in self.done.items():
                assert done <= least + 1 + (self.staleness if self.staleness is not None else done)
                if self.staleness != 0:
                    assert self.state.steps[worker] == done

    @invariant()
    def everything_pushed_is_applied_in_time(self) -> None:
        if getattr(self, "done", None):
            for worker, done in self.done.items():
                steps = sorted(step for who, step in self.applied if who == worker)
                assert steps == list(range(len(steps)))
                pending = 1 if self.staleness == 0 else 0
                assert done - pending <= len(steps) <= done


PushMachine.TestCase.settings = hypothesis_settings(max_examples=100, stateful_step_count=40)
TestPushMachine = PushMachine.TestCase


@given(st.integers(1, 6), st.integers(0, 400), st.integers(0, 1 << 30))
def test_the_mean_delay_of_asynchronous_training_is_one_less_than_the_workers(
    n: int, pushes: int, seed: int
) -> None:
    chance = random.Random(seed)
    speeds = [10 ** chance.uniform(-2, 0) for _ in range(n)]
    state: RangeState[None] = RangeState(dict.fromkeys(range(n), 0), staleness=None)
    delays, order = 0, []
    for _ in range(pushes):
        worker = chance.choices(range(n), speeds)[0]
        actions = state.push(worker, order.count(worker), None)
        order.append(worker)
        delays += sum(action.delay for action in actions if isinstance(action, Apply))
    # Each push adds one delay to the next push of every other worker, unless that worker does not
    # push again.
    last = [max((i for i, who in enumerate(order) if who == w), default=-1) for w in range(n)]
    never_seen = sum(pushes - 1 - place for place in last)
    assert delays + never_seen == (n - 1) * pushes


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_the_bounds_of_bounded_staleness_are_reached(staleness: int) -> None:
    n, s = 4, staleness
    state: RangeState[None] = RangeState(dict.fromkeys(range(n), 0), staleness=s)
    replies = [a for step in range(s) for a in state.push(0, step, None) if isinstance(a, Reply)]
    assert max(reply.missed for reply in replies) == s * (n - 1)
    actions = state.push(0, s, None)
    # Without a reply, worker 0 may not start step s + 1.
    assert not any(isinstance(action, Reply) for action in actions)
    assert state.missing() == (1, 2, 3)

    state = RangeState(dict.fromkeys(range(n), 0), staleness=s)
    for worker in (1, 2, 3):
        for step in range(s):
            state.push(worker, step, None)
        state.push(worker, s, None)  # step s begins before worker 0 pushes its first gradient
    first = [a for a in state.push(0, 0, None) if isinstance(a, Reply) and a.worker == 0]
    assert first[0].early == s * (n - 1)  # counts the pushes of steps 1 to s


def test_a_restored_range_goes_on_with_workers_of_different_steps() -> None:
    state: RangeState[str] = RangeState({0: 7, 1: 6}, staleness=0)
    assert state.push(0, 7, "a7") == []
    actions = state.push(1, 6, "b6")
    assert actions[0] == Apply(step=6, gradients=((1, "b6"),), delay=0)
    assert [a.worker for a in actions if isinstance(a, Reply)] == [1]
    actions = state.push(1, 7, "b7")
    # Worker 0 read its parameters before the repeated update of step 6.
    assert actions[0] == Apply(step=7, gradients=((0, "a7"), (1, "b7")), delay=1)
    assert state.least_applied == 8
