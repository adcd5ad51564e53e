"""Trials of plans in simulated worlds: all orders of events, delays, and ranks that leave the plan.

The trials are short. The random clock of a world decides the result of the trials.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.simulated_rank import Ask, Close, Command, JoinAll, Submit, Wait
from controller.test_agreement_machine import Step, commands_of, seeds, steps
from controller.world import World, explore, step_of
from unisono.controller import messages as m
from unisono.controller.fusion.fusion_tuner import FusionTuner
from unisono.controller.fusion.tuning_settings import TuningSettings
from unisono.controller.rank_state import Adopt

SHORT = TuningSettings(
    warm_up=0,
    measured=3,
    pairs=2,
    trial_pairs=1,
    block=2,
    faster_pairs=1,
    least_gain=-1e9,
    most_residual=1e9,
)
PASSES = SHORT.most_steps
TALKED = 3
"""Steps until a plan is frozen."""


def random_clock(seed: int) -> Callable[[], int]:
    """Returns a clock that advances by a random amount at each reading."""
    chance = random.Random(seed)
    now_ns = 0

    def read() -> int:
        nonlocal now_ns
        now_ns += chance.randrange(1, 200)
        return now_ns

    return read


def tuned(*programs: list[Command], seed: int = 0, **options: object) -> World:
    """Returns a world of these programs with short trials."""
    tuner = FusionTuner(settings=SHORT, seed=seed)
    return World(programs, tuner=tuner, now_ns=random_clock(seed), **options)


def varied(names: str = "abcde") -> list[Command]:
    """Returns a step with tensors of several sizes."""
    submits = [Submit(name, (1 + 40 * i,)) for i, name in enumerate(names)]
    return [*submits, *(Wait(name) for name in names)]


def backwards(step: list[Command]) -> list[Command]:
    """Returns the step with its submissions in reverse order."""
    submits = [each for each in step if isinstance(each, Submit)]
    return [*reversed(submits), *(each for each in step if isinstance(each, Wait))]


def test_all_ranks_follow_all_trials_and_the_same_decision() -> None:
    step = varied()
    decisions = set()
    for seed in range(20):
        world = tuned(step * 30, backwards(step) * 30, step * 30, seed=seed)
        world.run_at_random(seed)
        assert world.frozen and not world.messages(m.Thaw)
        reports = [rank.reports for rank in world.ranks]
        assert reports[0] == reports[1] == reports[2] and len(reports[0]) == 1
        (report,) = reports[0]
        adopted = [
            [each for each in rank.decisions if isinstance(each, Adopt)] for rank in world.ranks
        ]
        assert [each.buckets for each in adopted[0]] == [each.buckets for each in adopted[1]]
        assert tuple(each.names for each in adopted[0][-1].buckets) == report.buckets
        assert adopted[0][-1].trial is None
        decisions.add((len(adopted[0]), report.replaced))
        assert sum(map(len, world.ran())) == 30 * len("abcde")
    assert decisions >= {(4, True), (4, False)}


def test_ranks_fall_silent_after_the_trials() -> None:
    step = varied()
    count = TALKED + PASSES + 12
    for seed in range(8):
        world = tuned(step * count, step * count, seed=seed).run_at_random(seed)
        assert world.sent_after(len(step) * (TALKED + PASSES + 6)) == []


def test_trials_run_other_buckets() -> None:
    step = varied()
    world = tuned(step * 30, step * 30).run_at_random(0)
    assert len({tuple(names) for names in world.ran()}) > 6


@pytest.mark.parametrize("departs", range(TALKED, TALKED + PASSES + 2))
def test_program_may_depart_in_any_step_of_a_trial(departs: int) -> None:
    step, odd = varied("abc"), step_of("ac", shape=(7,))
    for seed in range(4):
        programs = [step * departs + odd + step * 8 for _ in range(3)]
        programs[1] = step * departs + list(reversed(odd[:2])) + odd[2:] + step * 8
        tuned(*programs, seed=seed).run_at_random(seed)


ODD: dict[str, list[Command]] = {
    "asks for stalls": [Submit("a", (1,)), Ask(), Wait("a"), *step_of("b", shape=(41,))],
    "another shape": [*step_of("a", shape=(9,)), *step_of("b", shape=(41,))],
    "a side tensor": [*step_of("x"), *varied("ab")],
    "a side tensor first, then waits": [Submit("a", (1,)), *step_of("x"), Wait("a"),
                                        *step_of("b", shape=(41,))],
    "one after another": [*step_of("a", shape=(1,)), *step_of("b", shape=(41,))],
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("on_all", [False, True])
def test_odd_step_around_the_end_of_a_trial(what: str, on_all: bool) -> None:
    usual = varied("ab")
    other = usual if "x" not in str(ODD[what]) else [*step_of("x"), *usual]
    for before in range(TALKED + 2, TALKED + 7):
        for seed in range(6):
            ends = [usual * before + each + usual * 9 for each in (ODD[what], other)]
            tuned(ends[0], ends[0] if on_all else ends[1], seed=seed).run_at_random(seed)


def test_side_tensor_that_ranks_submit_before_and_after_the_end_of_a_trial() -> None:
    """Lets one rank submit "x" after it has finished the trial, while the other rank waits for "x"
    before the end of the trial. No rank may hang.
    """
    usual = varied("ab")
    early = [*step_of("x"), *usual]
    late = [*usual[:2], *step_of("x"), *usual[2:]]
    for before in range(TALKED, TALKED + PASSES + 1):
        for seed in range(6):
            programs = [usual * before + each + usual * 4 for each in (early, late)]
            tuned(*programs, seed=seed).run_at_random(seed)


def test_rank_joins_or_closes_in_a_trial() -> None:
    usual = varied("ab")
    for count in range(TALKED, TALKED + PASSES + 2):
        for seed in range(4):
            joins: list[Command] = [*(usual * count), JoinAll(), *(usual * 4)]
            longer: list[Command] = [*(usual * (count + 2)), JoinAll(), *(usual * 4)]
            tuned(joins, longer, longer, seed=seed).run_at_random(seed)
            tuned([*(usual * count), Close()], usual * (count + 5), seed=seed).run_at_random(seed)


PAIRS: dict[str, tuple[list[Command], list[Command]]] = {
    "two tensors": (step_of("ab") * 5, step_of("ba") * 5),
    "dependent": ((step_of("a") + step_of("b")) * 5, (step_of("a") + step_of("b")) * 5),
    "a name vanishes": (step_of("ab") * 3 + step_of("a"), step_of("ab") * 3 + step_of("a")),
    "other shape on one rank": (
        step_of("ab") * 3 + step_of("a", shape=(3,)) + step_of("b"),
        step_of("ab") * 4,
    ),
    "joins in the trial": ([*(step_of("ab") * 3), JoinAll()], [*(step_of("ab") * 4), JoinAll()]),
    "asks at the end of the trial": (
        [*(step_of("ab") * 4), Submit("a"), Ask(), Wait("a"), *step_of("b")],
        step_of("ab") * 5,
    ),
    "closes in the trial": ([*(step_of("ab") * 4), Close()], step_of("ab") * 5),
}


@pytest.mark.parametrize("name", PAIRS)
def test_every_order_of_two_ranks_ends_well_with_a_trial(name: str) -> None:
    """Runs all orders of events. The clock stands still, so that states that would differ only in
    times are equal. The tuner then keeps the plan after one trial.
    """
    tuner = FusionTuner(settings=TuningSettings(warm_up=0, measured=2))
    world = World(PAIRS[name], freeze_after=1, wire=False, whole_turns=True, tuner=tuner)
    assert explore(world) > 100


@settings(max_examples=40)
@given(st.integers(2, 4), st.lists(steps(), min_size=1, max_size=4), seeds)
def test_random_programs_with_trials_run_each_tensor_once(
    size: int, program: list[Step], seed: int
) -> None:
    chance = random.Random(seed)
    repeated = [step for step in program for _ in range(chance.choice([1, 5, 12, 25]))]
    programs = [
        list(chain.from_iterable(commands_of(step, chance, {}) for step in repeated))
        for _ in range(size)
    ]
    fusion_bytes = chance.choice([0, 16, 1 << 20])
    world = tuned(*programs, seed=seed, fusion_bytes=fusion_bytes, freeze_after=1)
    world.run_at_random(seed)
    assert sum(map(len, world.ran())) == sum(len(phase) for step in repeated for phase in step)
