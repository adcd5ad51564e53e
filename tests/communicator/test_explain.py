"""Explanations of the choice of an algorithm: rule, source, times and second-best algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from ranks import Threads
from unisono import Communicator
from unisono.communicator import Explanation, IntRange, Measured, Rule, Selection
from unisono.selection.one_host_cost_model import predict
from unisono.types import Op

World = Callable[[int], Threads]


def explained(world: Threads, selection: Selection | None, nbytes: int = 4096) -> Explanation:
    """Returns rank 0's explanation of an all_reduce, in a group with this selection."""

    def ask(comm: Communicator) -> Explanation:
        child = comm.split(0, selection=selection)
        assert child is not None
        with child:
            found = child.explain("all_reduce", nbytes)
            child.barrier()
            return found

    answers: list[Explanation] = world.run(ask)
    assert answers[0] == answers[1]
    return answers[0]


def measured(algorithm: str, time_s: float) -> Measured:
    return Measured(op=Op.ALL_REDUCE, ranks=2, nbytes=4096, algorithm=algorithm, time_s=time_s)


def test_a_built_in_choice_has_a_prediction_and_a_runner_up(threads: World) -> None:
    found = explained(threads(2), None)
    assert (found.algorithm, found.source) == ("one_shot", "built-in")
    assert found.rule == "all_reduce, up to 4096 bytes, up to 2 ranks, 1 host: one_shot"
    assert found.time.measured_s is None and found.time.predicted_s > 0
    assert found.runner_up is not None and found.runner_up.algorithm != "one_shot"
    assert found.runner_up.measured_s is None
    assert "built-in" in str(found) and "predicted" in str(found)
    assert "predicted" in str(found) and str(found).count("not measured") == 2


@pytest.mark.parametrize("op", Op)
def test_times_are_measured_on_request(op: Op, threads: World) -> None:
    def ask(comm: Communicator) -> Explanation:
        return comm.explain(op, 1000, root=1 if op.rooted else 0, measure=True)

    first, *others = threads(3).run(ask)
    assert all(found == first for found in others)
    assert first.time.measured_s is not None and first.time.measured_s > 0
    assert first.runner_up is None or first.runner_up.measured_s is not None
    assert ", measured " in str(first)


def test_refused_algorithms_are_not_measured() -> None:
    ring = Measured(op=Op.ALL_REDUCE, ranks=4, nbytes=4096, algorithm="ring", time_s=1e-6)

    def ask(comm: Communicator) -> Explanation:
        child = comm.split(0, selection=Selection(measured=(ring,)))
        assert child is not None
        with child:
            return child.explain("all_reduce", 4096, measure=True)

    with Threads(4, reproducible=True) as world:
        found = world.run(ask)[0]
    assert found.time.measured_s is not None
    assert found.runner_up is not None
    assert (found.runner_up.algorithm, found.runner_up.measured_s) == ("ring", None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("allreduce", 8), "op: expected one of all_reduce, .*, not 'allreduce'"),
        (("all_reduce", -1), "a number from 0 up, not -1"),
        (("all_reduce", "64K"), "a number of bytes, not '64K'"),
        (("all_reduce", np.zeros(2)), r"a number of bytes, not array\(\[0., 0.\]\)"),
        (("broadcast", 8, 2), "root 2 is not one of the 2 ranks"),
        (("broadcast", 8, np.zeros(2)), "the number of a rank, not array"),
    ],
)
def test_wrong_arguments_of_explain_are_refused(
    arguments: tuple[Any, ...], text: str, threads: World
) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        threads(2).comms[0].explain(*arguments)


def test_measured_times_decide_the_runner_up(threads: World) -> None:
    rule = Rule(op=Op.ALL_REDUCE, algorithm="ring", nbytes=IntRange(0, 5000), reason="because")
    times = (measured("ring", 2e-6), measured("swing", 4e-6), measured("direct", 3e-6))
    found = explained(threads(2), Selection(rules=(rule,), measured=times))
    assert (found.algorithm, found.reason, found.source) == ("ring", "because", "argument")
    assert found.time.measured_s == 2e-6
    assert found.runner_up is not None
    assert (found.runner_up.algorithm, found.runner_up.measured_s) == ("direct", 3e-6)
    assert "measured 2 us" in str(found) and "measured 3 us" in str(found)
    assert asdict(found)["runner_up"]["algorithm"] == "direct"


def test_without_a_rule_for_the_size_the_next_layer_decides(threads: World) -> None:
    rule = Rule(op=Op.ALL_REDUCE, algorithm="ring", nbytes=IntRange(0, 10))
    found = explained(threads(2), Selection(rules=(rule,)), nbytes=1 << 20)
    assert (found.algorithm, found.source) == ("direct", "built-in")


def test_a_prediction_comes_from_the_cost_model(threads: World) -> None:
    rule = Rule(op=Op.ALL_REDUCE, algorithm="ring:channels=2")
    found = explained(threads(2), Selection(rules=(rule,)))
    candidates = [predict("all_reduce", "ring", 2, 4096, cores=cores) for cores in (1, 2)]
    assert any(found.time.predicted_s == pytest.approx(time_s) for time_s in candidates)


def test_an_operation_with_one_algorithm_has_no_runner_up(threads: World) -> None:
    found = threads(2).comms[0].explain("barrier", 0)
    assert found.runner_up is None
    assert "runner-up: none" in str(found)
