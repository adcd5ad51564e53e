"""Random programs on up to five ranks, with random delays."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from controller.simulated_rank import Command, JoinAll, Submit, Wait
from controller.world import World

NAMES = "abcdef"
LONG = 24
"""Steps until a plan is frozen again, whatever happened before."""

Step = list[list[str]]
"""Names in phases. A rank may wait for tensors of one phase before it submits the next."""

seeds = st.integers(0, 2**32)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    cuts = sorted(draw(st.sets(st.integers(1, len(names)), max_size=2)))
    bounds = zip([0, *cuts], [*cuts, len(names)], strict=True)
    return [names[begin:end] for begin, end in bounds if begin < end]


def commands_of(step: Step, habits: random.Random, shapes: dict[str, int]) -> list[Command]:
    """Returns the commands of one rank for a step. The rank's `habits` choose the order of its
    submissions within a phase, and the tensors that it waits for at the end of a phase.
    """
    commands: list[Command] = []
    waiting: list[str] = []
    for phase in step:
        for name in habits.sample(phase, len(phase)):
            priority = habits.randrange(3)
            commands.append(Submit(name, (shapes.get(name, 2),), priority=priority))
            waiting.append(name)
        for name in habits.sample(waiting, habits.choice([0, 0, 1, len(waiting)])):
            commands.append(Wait(name))
            waiting.remove(name)
    return commands + [Wait(name) for name in habits.sample(waiting, len(waiting))]


@settings(max_examples=40)
@given(
    st.integers(1, 5),
    st.lists(steps(), min_size=1, max_size=12),
    st.sampled_from([0, 16, 1 << 20]),
    st.sampled_from([1, 2]),
    seeds,
)
def test_random_programs_run_each_tensor_once(
    size: int, program: list[Step], fusion_bytes: int, freeze_after: int, seed: int
) -> None:
    chance = random.Random(seed)
    repeated = [step for step in program for _ in range(chance.choice([1, 1, 3, 5]))]
    programs = [
        [command for step in repeated for command in commands_of(step, chance, {})]
        for _ in range(size)
    ]
    options = {"fusion_bytes": fusion_bytes, "freeze_after": freeze_after}
    world = World(programs, **options).run_at_random(seed)
    submitted = sum(len(phase) for step in repeated for phase in step)
    assert sum(map(len, world.ran())) == submitted


@settings(max_examples=25)
@given(st.integers(1, 5), st.lists(steps(), max_size=2), steps(), seeds)
def test_repeated_programs_fall_silent(
    size: int, before: list[Step], step: Step, seed: int
) -> None:
    """Repeats a step in which each rank keeps its own order and its own waits. The ranks must
    freeze a plan and then send no more messages.
    """
    programs = []
    for rank in range(size):
        first = [
            command for each in before for command in commands_of(each, random.Random(rank), {}) * 4
        ]
        habit = commands_of(step, random.Random(seed + rank), {})
        programs.append(first + habit * LONG)
    world = World(programs).run_at_random(seed)
    assert world.frozen
    silent = max(map(len, programs)) - 2 * max(len(program) for program in programs) // LONG
    assert world.sent_after(silent) == []


@settings(max_examples=25)
@given(st.integers(2, 4), st.lists(steps(), min_size=1, max_size=8), seeds)
def test_random_shapes_are_refused_or_run(size: int, program: list[Step], seed: int) -> None:
    chance = random.Random(seed)
    repeated = [step for step in program for _ in range(chance.choice([1, 4]))]
    programs: list[list[Command]] = [[] for _ in range(size)]
    differing: list[bool] = []
    for step in repeated:
        odd = [{name: chance.choice([2, 2, 2, 2, 3]) for name in "ab"} for _ in range(size)]
        names = {name for phase in step for name in phase}
        differing += [len({each[name] for each in odd}) > 1 for name in sorted(names & set("ab"))]
        for rank in range(size):
            programs[rank] += commands_of(step, chance, odd[rank])
    world = World(programs, freeze_after=1).run_at_random(seed)
    refused = [each for each in world.ranks[0].outcomes.values() if each.exception is not None]
    assert len(refused) == sum(differing)


@settings(max_examples=25)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=4), steps(), st.booleans(), seeds)
def test_random_joins_end_together(
    counts: Sequence[int], step: Step, again: bool, seed: int
) -> None:
    chance = random.Random(seed)
    programs = []
    for count in counts:
        commands = [each for _ in range(count) for each in commands_of(step, chance, {})]
        programs.append([*commands, JoinAll()] * (2 if again else 1))
    world = World(programs, freeze_after=chance.choice([1, 2])).run_at_random(seed)
    assert len({rank.last_joined for rank in world.ranks}) == 1
