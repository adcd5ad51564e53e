"""Weights reach all workers, whoever joins, leaves, dies or has other arrays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from unisono.errors import CollectiveTimeoutError, PeerLostError, RendezvousError
from unisono.weight_transfer import WeightReceiver, WeightSender

LIMIT_S = 60.0


def weights(step: int) -> dict[str, Any]:
    """Arrays of many kinds, which depend on the step: large, small, empty, strided, of no shape."""
    generator = np.random.default_rng(step)
    large = generator.random((700, 512))
    return {
        "large": large,
        "strided": generator.random((40, 60))[::2, ::3],
        "small": generator.integers(0, 99, 7, np.int8),
        "half": generator.random(5).astype(np.float16),
        "empty": np.empty((0, 3)),
        "scalar": np.array(float(step)),
        "large, strided": generator.random((600, 600)).T,
        "complex": generator.random(3) + 1j,
        "bool": generator.random(9) > 0.5,
    }


def require_equal(found: Mapping[str, Any], step: int) -> None:
    wanted = weights(step)
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        np.testing.assert_array_equal(found[name], each, strict=True)


class Thread:
    """A worker as a thread."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self._outcome: Any = None
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def _run(self, body: Callable[[], Any]) -> None:
        try:
            self._outcome = body()
        except Exception as error:
            self._outcome = error

    def outcome(self) -> Any:
        """Returns the result or the error."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        return self._outcome


def receive(address: str, updates: int) -> list[Mapping[str, Any]]:
    with WeightReceiver(address) as worker:
        found = []
        for _ in range(updates):
            received = worker.receive()
            assert received is not None
            found.append({name: np.copy(each) for name, each in received.items()})
        return found


PROGRAM = """
import sys
from unisono.weight_transfer import WeightReceiver
worker, into, stop = WeightReceiver(sys.argv[1]), None, int(sys.argv[2])
while (into := worker.receive(into)) is not None:
    print(worker.number, float(into["x"].sum()), flush=True)
    if worker.number == stop:
        sys.stdin.read()  # busy until its end
"""


@contextlib.contextmanager
def process(address: str, *, busy_after: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Starts a worker as a process that prints the number and the sum of each update."""
    command = [sys.executable, "-c", PROGRAM, address, str(busy_after)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def line(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


@pytest.mark.parametrize("count", [1, 3])
def test_all_workers_get_all_arrays(count: int) -> None:
    with WeightSender(timeout_s=LIMIT_S) as sender:
        address = sender.address
        workers = [Thread(lambda: receive(address, 3)) for _ in range(count)]
        for step in range(3):
            update = sender.send(weights(step), workers=count)
            assert (len(update.workers), update.failed) == (count, {})
            assert (update.number, update.nbytes > 5_000_000) == (step + 1, True)
        for worker in workers:
            for step, found in enumerate(worker.outcome()):
                require_equal(found, step)


def test_values_arrive_in_the_arrays_of_a_worker() -> None:
    with WeightSender(timeout_s=LIMIT_S) as sender:
        into = {
            name: np.zeros((*each.shape, 2), each.dtype)[..., 0]
            for name, each in weights(0).items()
        }
        worker = Thread(lambda: WeightReceiver(sender.address).receive(into))
        sender.send(weights(5))
        assert worker.outcome() is into
        require_equal(into, 5)


def test_tensors_arrive_as_tensors() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).bfloat16()
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).bfloat16()
    given = {"conj": torch.tensor([1 + 2j, 3]).conj(), **model.state_dict()}
    with WeightSender(timeout_s=LIMIT_S) as sender:
        first = Thread(lambda: WeightReceiver(sender.address).receive())
        sender.send(given)
        found = first.outcome()
        second = Thread(lambda: WeightReceiver(sender.address).receive(other.state_dict()))
        sender.send(model.state_dict(), workers=2 - 1)
        second.outcome()
    for name, each in given.items():
        assert found[name].dtype == each.dtype
        assert torch.equal(found[name], each.resolve_conj())
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_workers_join_and_leave_between_updates() -> None:
    with WeightSender(timeout_s=LIMIT_S) as sender:
        first = Thread(lambda: receive(sender.address, 2))
        sender.send(weights(0))
        second = Thread(lambda: receive(sender.address, 2))
        _until(lambda: sender.workers == 2)
        assert len(sender.send(weights(1)).workers) == 2
        require_equal(first.outcome()[1], 1)  # it leaves
        _until(lambda: sender.workers == 1)
        assert len(sender.send(weights(2)).workers) == 1
        for step, found in enumerate(second.outcome(), 1):
            require_equal(found, step)


def test_a_worker_takes_part_as_soon_as_it_is_made() -> None:
    with WeightSender(timeout_s=LIMIT_S) as sender:
        workers = [WeightReceiver(sender.address) for _ in range(4)]
        assert (sender.workers, len(sender.connected), sender.waiting) == (4, 4, frozenset())
        for worker in workers:
            worker.close()
        _until(lambda: not sender.connected)


def test_an_update_for_some_workers() -> None:
    with WeightSender(timeout_s=LIMIT_S) as sender:
        chosen = Thread(lambda: receive(sender.address, 2))
        _until(lambda: len(sender.waiting) == 1)
        members = sender.waiting
        late = WeightReceiver(sender.address)  # does not want weights, and must not be waited for
        for step in range(2):
            update = sender.send(weights(step), only=members)
            assert (frozenset(update.workers), update.failed) == (members, {})
        for step, found in enumerate(chosen.outcome()):
            require_equal(found, step)
        assert late.number == 0
        late.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_dies_costs_no_other_worker_its_weights(how: signal.Signals) -> None:
    values = {"x": np.ones(2**21)}
    with (
        WeightSender(timeout_s=LIMIT_S) as sender,
        process(sender.address) as stays,
        process(sender.address) as dies,
    ):
        assert len(sender.send(values, workers=2).workers) == 2
        assert line(stays) == line(dies) == f"1 {2.0**21}"
        os.kill(dies.pid, how)
        values["x"][:] = 2
        update = sender.send(values)
        assert len(update.workers) == 1
        assert line(stays) == f"2 {2.0**22}"


def test_a_worker_that_dies_during_an_update() -> None:
    values = {f"{number}": np.full(2**20, float(number)) for number in range(24)}
    values["x"] = np.ones(2)
    with (
        WeightSender(timeout_s=LIMIT_S) as sender,
        process(sender.address) as stays,
        process(sender.address) as dies,
    ):
        sender.send(values, workers=2)
        sending = Thread(lambda: sender.send(values))
        time.sleep(0.02)  # at any time of the update
        os.kill(dies.pid, signal.SIGKILL)
        update = sending.outcome()
        assert len(update.workers) + len(update.failed) == 2
        assert (line(stays), line(stays)) == ("1 2.0", "2 2.0")


def test_a_busy_worker_gets_the_next_update() -> None:
    values = {"x": np.ones(4)}
    with WeightSender(timeout_s=LIMIT_S) as sender, process(sender.address, busy_after=1) as busy:
        sender.send(values)
        assert line(busy) == "1 4.0"
        free = Thread(lambda: receive(sender.address, 2))
        _until(lambda: sender.workers == 2)
        sender._timeout_s = 0.5
        update = sender.send(values)
        assert len(update.workers) == 1
        assert [*update.failed.values()] == ["has not called receive within 0.5 s"]
        sender._timeout_s = LIMIT_S
        assert busy.stdin is not None
        busy.stdin.close()
        assert len(sender.send(values).workers) == 2
        assert line(busy) == "3 4.0"
        free.outcome()


@pytest.mark.parametrize(
    ("into", "error"),
    [
        ({"x": np.ones(4)}, "x: the trainer sends float64[3], and the worker has float64[4]"),
        ({"x": np.ones(3, "f4")}, "x: the trainer sends float64[3], and the worker has float32[3]"),
        ({"y": np.ones(3)}, "into: the worker has no x, and the trainer sends no y"),
        ({"x": [1, 2, 3]}, "x: expected a NumPy array or a torch tensor, not list"),
    ],
)
def test_other_arrays_are_refused_on_that_worker_alone(into: Any, error: str) -> None:
    with WeightSender(timeout_s=LIMIT_S) as sender:
        right = Thread(lambda: receive(sender.address, 2))
        wrong = WeightReceiver(sender.address)
        refused = Thread(lambda: wrong.receive(into))
        update = sender.send({"x": np.ones(3)}, workers=2)
        assert len(update.workers) == 1
        assert error in next(iter(update.failed.values()))
        assert error in str(refused.outcome())
        again = Thread(wrong.receive)
        assert len(sender.send({"x": np.ones(3)}).workers) == 2
        assert again.outcome()["x"].tolist() == right.outcome()[1]["x"].tolist() == [1, 1, 1]


def test_the_end_of_the_sender() -> None:
    sender = WeightSender(timeout_s=LIMIT_S)
    waits = Thread(WeightReceiver(sender.address).receive)
    _until(lambda: sender.workers == 1)
    sender.close()
    assert waits.outcome() is None
    with pytest.raises(RendezvousError, match="cannot reach the sender of weights"):
        WeightReceiver(sender.address)


def test_a_sender_that_dies_is_told() -> None:
    code = (
        "from unisono.weight_transfer import WeightSender\n"
        "s = WeightSender(); print(s.address, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        worker = WeightReceiver(line(trainer))
        waits = Thread(worker.receive)
        trainer.kill()
        assert isinstance(waits.outcome(), PeerLostError)


def test_a_sender_without_workers_says_so() -> None:
    with WeightSender(timeout_s=0.1) as sender:
        with pytest.raises(CollectiveTimeoutError, match="0 of 2 workers have connected"):
            sender.send(weights(0), workers=2)
        with pytest.raises(TypeError, match="x: expected a NumPy array or a torch tensor"):
            sender.send({"x": 3})


@pytest.mark.parametrize(
    "address", ["", "weights://host", "tcp://host:3/" + "0" * 32, "weights://h:1/" + "g" * 32]
)
def test_a_wrong_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"address: expected the text of WeightSender\.address"):
        WeightReceiver(address)


def test_a_wrong_key_is_refused() -> None:
    with WeightSender() as sender:
        where, _, _ = sender.address.rpartition("/")
        with pytest.raises(RendezvousError, match="cannot reach the sender of weights"):
            WeightReceiver(f"{where}/{'0' * 32}")
        assert sender.workers == 0


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
