"""Works, futures and coalesced calls, with handles that the test completes."""

from __future__ import annotations

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from unisono.errors import PeerLostError, UnisonoError  # noqa: E402
from unisono.torch_backend.coalesce import CoalescedCalls  # noqa: E402
from unisono.torch_backend.pending_work import DONE, CombinedHandle, Completer, pending  # noqa: E402

pytestmark = pytest.mark.torch


class ManualHandle:
    """A handle that completes when the test calls `finish`."""

    def __init__(self):
        self._ended = threading.Event()
        self._error = None

    def finish(self, error=None):
        self._error = error
        self._ended.set()

    def wait(self, timeout_s=None):
        assert self._ended.wait(timeout_s or 10.0)
        if self._error is not None:
            raise self._error

    def is_completed(self):
        return self._ended.is_set()

    def exception(self):
        return self._error

    def source_rank(self):
        return 3


class RecordingCommunicator:
    """A simulated communicator that records calls. Each call returns a completed handle."""

    rank = 2

    def __init__(self):
        self.calls = []

    def all_reduce(self, x, op, *, async_op=False):
        self.calls.append((x, op, async_op))
        handle = ManualHandle()
        handle.finish()
        return handle


@pytest.fixture
def completer():
    completer = Completer()
    yield completer
    completer.close()


def test_future_of_an_ended_handle_is_complete_at_once(completer):
    handle = ManualHandle()
    handle.finish()
    tensors = [torch.ones(2)]
    before = set(threading.enumerate())
    assert pending(handle, tensors, completer).get_future().value() == tensors
    assert not set(threading.enumerate()) - before


def test_futures_complete_as_their_handles_end(completer):
    handles = [ManualHandle(), ManualHandle()]
    futures = [completer.future_of(handle, [torch.ones(1)]) for handle in handles]
    assert not futures[0].done()
    handles[0].finish()
    futures[0].wait()
    assert not futures[1].done()
    handles[1].finish()
    futures[1].wait()


def test_failure_reaches_future_and_wait(completer):
    handle = ManualHandle()
    work = pending(handle, [], completer)
    future = work.get_future()
    handle.finish(PeerLostError("rank 1 is gone"))
    with pytest.raises(RuntimeError, match="PeerLostError: rank 1 is gone"):
        future.wait()
    with pytest.raises(RuntimeError, match="PeerLostError: rank 1 is gone"):
        work.get_future().then(lambda failed: failed.value()).wait()
    with pytest.raises(PeerLostError, match="rank 1"):
        work.wait()
    assert not work.is_success()
    assert isinstance(work.exception(), PeerLostError)


def test_callback_may_wait_for_another_future(completer):
    outer, inner = ManualHandle(), ManualHandle()

    def callback(_):
        return completer.future_of(inner, [torch.full((1,), 7.0)]).wait()[0]

    chained = completer.future_of(outer, []).then(callback)
    outer.finish()
    time.sleep(0.05)
    assert not chained.done()
    inner.finish()
    assert chained.wait().item() == 7.0


def test_source_rank_of_a_receive(completer):
    assert pending(ManualHandle(), [], completer)._source_rank() == 3


def test_combined_handle_fails_with_the_first_failure():
    handles = [ManualHandle(), ManualHandle()]
    together = CombinedHandle(handles)
    assert not together.is_completed()
    handles[0].finish(PeerLostError("first"))
    handles[1].finish(PeerLostError("second"))
    assert together.is_completed()
    assert str(together.exception()) == "first"
    with pytest.raises(PeerLostError, match="first"):
        together.wait()


def test_finished_work_needs_no_waiting():
    assert DONE.wait()
    assert DONE.is_completed()
    assert DONE.get_future().done()


def test_coalesced_calls_are_issued_in_order():
    comm = RecordingCommunicator()
    recorder = CoalescedCalls(comm)
    first = recorder.all_reduce("a", "sum", async_op=True)
    recorder.all_reduce("b", "max")
    assert comm.calls == []
    assert recorder.rank == 2
    with pytest.raises(UnisonoError, match="coalesc"):
        first.wait()
    handles = recorder.issue()
    assert comm.calls == [("a", "sum", True), ("b", "max", True)]
    assert len(handles) == 2
    first.wait()
    assert first.is_completed()
