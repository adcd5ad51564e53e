"""Wrong arguments of one tensor: an error at its submission, and no effect on other tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ranks import Threads
from unisono import Communicator, premul_sum
from unisono.controller import Controller

World = Callable[[int], Threads]
Submission = Callable[[Controller], Any]


def _read_only(length: int = 3) -> Any:
    array = np.ones(length)
    array.flags.writeable = False
    return array


WRONG: dict[str, tuple[type[Exception], str, Submission]] = {
    "unknown op": (
        ValueError,
        "tensor 'bad': all_reduce of float64: op: expected one of sum, .*avg, not 'mean'",
        lambda c: c.all_reduce("bad", np.ones(3), "mean"),
    ),
    "unknown op of a reduce_scatter": (
        ValueError,
        "tensor 'bad': reduce_scatter of float64: op: .* not 'mean'",
        lambda c: c.reduce_scatter("bad", np.ones(6), "mean"),
    ),
    "avg of bool": (
        ValueError,
        "tensor 'bad': all_reduce of bool: op: expected one of sum, .*lxor, not 'avg'",
        lambda c: c.all_reduce("bad", np.ones(3, bool), "avg"),
    ),
    "bits of floats": (
        ValueError,
        "tensor 'bad': all_reduce of float32: op: .* not 'bxor'",
        lambda c: c.all_reduce("bad", torch.ones(3), "bxor"),
    ),
    "a factor": (
        ValueError,
        "tensor 'bad': all_reduce of float64: op: .* not 'premul_sum'",
        lambda c: c.all_reduce("bad", np.ones(3), premul_sum(0.5)),  # type: ignore[arg-type]
    ),
    "a read-only array": (
        ValueError,
        "tensor 'bad': the array is read-only.* give a writable one",
        lambda c: c.all_reduce("bad", _read_only()),
    ),
    "a read-only array of a receiver": (
        ValueError,
        "tensor 'bad': the array is read-only.* give a writable one",
        lambda c: c.broadcast("bad", _read_only(), root=(c.rank + 1) % c.size),
    ),
    "an expanded array": (
        ValueError,
        r"tensor 'bad': elements of the tensor share memory.* give its .contiguous\(\)",
        lambda c: c.all_reduce("bad", torch.ones(1).expand(3)),
    ),
    "no array": (
        TypeError,
        "tensor 'bad': expected a NumPy array",
        lambda c: c.all_gather("bad", [1.0]),
    ),
    "elements of text": (
        ValueError,
        "tensor 'bad': elements of type <U1 are not supported",
        lambda c: c.all_gather("bad", np.array(["a"])),
    ),
    "a root out of range": (
        ValueError,
        "tensor 'bad': root [23] is not one of the [23] ranks",
        lambda c: c.broadcast("bad", np.ones(3), root=c.size),
    ),
    "a negative root": (
        ValueError,
        "tensor 'bad': root -1 is not one of the [23] ranks",
        lambda c: c.broadcast("bad", np.ones(3), root=-1),
    ),
    "a root that is no number": (
        TypeError,
        "tensor 'bad': root: expected the number of a rank, not 'first'",
        lambda c: c.broadcast("bad", np.ones(3), root="first"),  # type: ignore[arg-type]
    ),
    "a priority that is no number": (
        TypeError,
        "tensor 'bad': priority: expected a whole number, not 'high'",
        lambda c: c.all_reduce("bad", np.ones(3), priority="high"),  # type: ignore[arg-type]
    ),
    "uneven shares of a reduce_scatter": (
        ValueError,
        r"tensor 'bad': reduce_scatter on [23] ranks: expected a multiple of [23] elements, not 7 ",
        lambda c: c.reduce_scatter("bad", np.ones(7)),
    ),
    "uneven shares of an all_to_all": (
        ValueError,
        r"tensor 'bad': all_to_all on [23] ranks: expected a multiple of [23] elements, not 7 ",
        lambda c: c.all_to_all("bad", np.ones(7)),
    ),
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_wrong_argument_ends_no_other_tensor(ranks: int, threads: World) -> None:
    def check(comm: Communicator) -> None:
        with Controller(comm) as controller:
            for what, (kind, text, submit) in WRONG.items():
                early, late = np.full(2, comm.rank + 1.0), np.full(2, comm.rank + 2.0)
                pending = None
                if comm.rank == 0:
                    pending = controller.all_reduce("early", early)
                before = controller.stats().tensors_submitted
                with pytest.raises(kind, match=text) as caught:
                    submit(controller)
                assert "\n" not in str(caught.value), what
                assert controller.stats().tensors_submitted == before, what
                if pending is None:
                    pending = controller.all_reduce("early", early)
                after = controller.all_reduce("bad", late)
                total = ranks * (ranks + 1) / 2
                assert pending.wait(20).tolist() == [total] * 2, what
                assert after.wait(20).tolist() == [total + ranks] * 2, what

    threads(ranks).run(check)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_read_only_array_does_not_enter_a_plan(ranks: int, threads: World) -> None:
    class Named(np.ndarray):
        pass

    def check(comm: Communicator) -> None:
        with Controller(comm, tune_fusion=False) as controller:
            for step in range(8):
                if step == 6:
                    assert controller._loop._planned.count > 0
                    for array in (_read_only(), _read_only().view(Named)):
                        if comm.rank == 0:
                            with pytest.raises(ValueError, match="tensor 'a': the array is read-"):
                                controller.all_reduce("a", array)
                        assert array.tolist() == [1.0] * 3
                arrays = {name: np.full(3, comm.rank + step + 0.0) for name in "ab"}
                handles = [controller.all_reduce(name, array) for name, array in arrays.items()]
                for handle in handles:
                    total = ranks * (ranks - 1) / 2 + ranks * step
                    assert handle.wait(20).tolist() == [total] * 3
            assert controller.stats().plan_changes == 1

    threads(ranks).run(check)


def test_the_root_may_send_a_read_only_array(threads: World) -> None:
    def check(comm: Communicator) -> None:
        with Controller(comm) as controller:
            array = _read_only() if comm.rank == 1 else np.zeros(3)
            root: Any = np.int64(1)  # the messages between ranks carry Python's numbers only
            assert controller.broadcast("w", array, root).wait(20).tolist() == [1.0] * 3

    threads(2).run(check)
