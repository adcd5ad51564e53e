"""Calls that a group passes to torch's group of the other devices, and calls that the group
refuses.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers torch's backend

from torch_backend.on_device import DEVICE, on_device
from unisono.errors import UnsupportedError
from unisono.torch_backend import Options, missing_methods, reserved
from unisono.torch_backend.group_creation import create
from unisono.torch_backend.mixed import ROUTED, MixedGroup
from unisono.torch_backend.other_devices import OtherBackends
from unisono.torch_backend.private import group_making
from unisono.torch_backend.process_group import ProcessGroup

pytestmark = pytest.mark.torch
BOTH_ORDERS = pytest.mark.parametrize("first", ["unisono", "other"])


def spec(first, other):
    parts = ["cpu:unisono", other]
    return ",".join(parts if first == "unisono" else reversed(parts))


@contextmanager
def alone(backend, **options):
    """Makes a default group of one rank for the duration of a block."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Recorded:
    """Replaces torch's group of the other devices and records its calls."""

    bound_device_id = None

    def __init__(self, coalesces=False, fails_at=None):
        self.asked = []
        self.supports_coalescing = coalesces
        self.fails_at = fails_at

    def _get_backend(self, device):
        return self

    def __getattr__(self, name):
        def note(*args, **options):
            self.asked.append(name)
            if len(self.asked) == self.fails_at:
                raise RuntimeError("refused")
            return f"work of {name}"

        return note


@pytest.fixture
def group():
    with alone("cpu:unisono,xpu:gloo") as made:
        yield made


@pytest.fixture
def recorded(group, monkeypatch):
    def put(**options):
        found = Recorded(**options)
        monkeypatch.setattr(group, "others", replace(group.others, group=found))
        monkeypatch.setattr(group._batched, "_group", found)
        return found

    return put


def test_every_method_passes_device_tensors_on(group, recorded):
    other = recorded()
    tensor = on_device(1.0)
    for name in ROUTED:
        assert getattr(group, name)([[]], [[tensor]], 0) == f"work of {name}"
        assert getattr(group, name)(tensor, 0) == f"work of {name}"
        assert getattr(group, name)(tensors=[tensor], opts=None) == f"work of {name}"
        assert getattr(group, name)([[]], inputs=[[tensor]]) == f"work of {name}"
    assert other.asked == [name for name in ROUTED for _ in range(4)]


def test_every_method_that_takes_tensors_is_routed():
    takes_none = {
        "abort", "barrier", "derived", "getBackendName", "get_backend", "get_group_store",
        "monitored_barrier", "name", "rank", "set_timeout", "shrink_group", "serve", "shutdown",
        "size", "split_group", "stand_in",
    }  # fmt: skip
    ours = [cls for cls in ProcessGroup.__mro__ if "unisono" in cls.__module__]
    methods = {
        name
        for cls in ours
        for name, member in vars(cls).items()
        if inspect.isfunction(member) and (name[0] != "_" or name.endswith("_base"))
        if member.__module__ != missing_methods.__name__
    }
    assert methods - takes_none == set(ROUTED)


def test_barrier_and_coalescing_use_the_backend_of_their_device(group, recorded):
    other = recorded()
    options = dist.BarrierOptions()
    options.device = DEVICE
    assert group.barrier(options) == "work of barrier"
    with dist.distributed_c10d._coalescing_manager(group, DEVICE, async_ops=True) as both:
        group.broadcast([on_device(1.0)], 0)
    assert both.works == ["work of _end_coalescing"]
    assert other.asked == ["barrier", "_start_coalescing", "broadcast", "_end_coalescing"]


def test_timeout_abort_and_shutdown_reach_the_other_backend():
    with alone("cpu:unisono,xpu:gloo"):
        group = dist.new_group()
        other = Recorded()
        group.others = replace(group.others, group=other)
        group.set_timeout(timedelta(seconds=7))
        group.abort()
        dist.destroy_process_group(group)
        assert other.asked == ["set_timeout", "abort", "shutdown"]


def test_shrinking_aborts_the_other_backend(group, recorded):
    other = recorded()
    shrunk = reserved.shrink_group()
    assert other.asked == ["abort", "shutdown"]
    assert shrunk is dist.group.WORLD and type(shrunk) is MixedGroup
    tensor = on_device(1.0)
    dist.all_reduce(tensor)
    assert tensor.memory.tolist() == [1.0]
    shrunk.bound_device_id = DEVICE
    with pytest.raises(UnsupportedError, match="bound to xpu:0 cannot be shrunk: destroy it"):
        reserved.shrink_group()


def operations(*devices):
    tensors = [on_device(1.0) if device == "xpu" else torch.ones(1) for device in devices]
    return [dist.P2POp((dist.isend, dist.irecv)[i % 2], x, 0) for i, x in enumerate(tensors)]


def test_batch_is_one_call_of_a_backend_that_coalesces(recorded, monkeypatch):
    monkeypatch.setattr(dist.distributed_c10d, "_check_not_self_rank", lambda *_: None)
    other = recorded(coalesces=True)
    for _ in range(2):
        works = dist.batch_isend_irecv(operations("xpu", "cpu", "xpu", "cpu", "xpu"))
        assert [work for work in works if isinstance(work, str)] == ["work of _end_coalescing"]
        assert other.asked == ["_start_coalescing", "send", "send", "send", "_end_coalescing"]
        other.asked.clear()


def test_batch_that_fails_is_ended(recorded):
    other = recorded(coalesces=True, fails_at=3)
    with suppress(RuntimeError):
        dist.batch_isend_irecv(operations("xpu", "xpu", "xpu"))
    assert other.asked == ["_start_coalescing", "send", "recv", "_end_coalescing"]


def test_next_batch_ends_one_that_torch_refused(recorded, monkeypatch):
    other = recorded(coalesces=True)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="bad message"):
        messages = operations("xpu", "xpu")
        patch.setattr(messages[1], "op", _refuse)
        dist.batch_isend_irecv(messages)
    monkeypatch.setattr(dist.distributed_c10d, "_check_not_self_rank", lambda *_: None)
    assert dist.batch_isend_irecv(messages) == ["work of _end_coalescing"]
    start, end = "_start_coalescing", "_end_coalescing"
    assert other.asked == [start, "send", end, start, "send", "recv", end]


def _refuse(*args, **options):
    raise ValueError("bad message")


def test_messages_outside_a_batch_begin_separately(recorded):
    other = recorded(coalesces=True)
    dist.irecv(on_device(1.0), 0)
    assert other.asked == ["recv"]


@BOTH_ORDERS
def test_missing_backend_fails_as_in_torch(first):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU for NCCL")
    texts = []
    ours = spec(first, "cuda:nccl")
    for backend in (ours.replace("unisono", "gloo"), ours):
        with pytest.raises((RuntimeError, ValueError)) as caught:  # noqa: SIM117
            with alone(backend):
                pass
        texts.append((caught.type, str(caught.value).splitlines()[0]))
    assert texts[0] == texts[1]
    with alone("unisono"):  # the failed attempt did not change the state
        dist.barrier()


@BOTH_ORDERS
def test_plug_ins_for_other_devices_work(first):
    with alone(spec(first, "cuda:fake")) as group:
        assert type(group) is MixedGroup
        assert type(group._get_backend(torch.device("cuda"))).__name__ == "FakeProcessGroup"
        assert group._get_backend(torch.device("cuda")) is not group._own_backend
        seen = [None]
        dist.all_gather_object(seen, "object")
        assert seen == ["object"]


def test_several_other_devices_work():
    with alone("xpu:gloo,cpu:unisono,cuda:fake") as group:
        assert {device.type for device in group._device_types} == {"cpu", "cuda", "xpu"}
        tensor = on_device(1.0)
        dist.all_reduce(tensor)
        assert tensor.memory.tolist() == [1.0]


def test_torch_that_splits_devices_only_together_is_refused_in_a_sentence():
    class Old:
        def split_group(self, ranks, timeout, options, name, description):
            """Splits the group for all devices, as in torch 2.9."""

    others = OtherBackends(group=Old(), backends={"xpu": "gloo", "cuda": "fake"})
    assert others.split([0], ["xpu", "cuda"], timedelta(seconds=1), None, "a", "b") is None
    with pytest.raises(UnsupportedError, match="xpu, cuda only together, not xpu alone: leave"):
        others.split([0], ["xpu"], timedelta(seconds=1), None, "a", "b")


def test_torchs_debugging_wraps_the_other_backend(monkeypatch):
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with alone("cpu:unisono,xpu:gloo") as group:
            assert "Wrapper" in type(group._get_backend(DEVICE)).__name__
    finally:
        dist.set_debug_level(level)


def test_our_options_do_not_reach_the_other():
    seen = []

    def make(options, theirs):
        seen.append(theirs)
        return dist.Backend._plugins["FAKE"].creator_fn(options, None)

    dist.Backend.register_backend("noting", make, extended_api=True, devices=["xpu"])
    with alone("cpu:unisono,xpu:noting", pg_options=Options(reproducible=True)):
        assert seen == [None]


def test_third_party_backend_may_use_ours():
    name = "built_on_unisono"
    dist.Backend.register_backend(
        name, lambda options, _: create(options, None), extended_api=True, devices=["cpu"]
    )
    with alone(f"cpu:{name},xpu:gloo") as group:
        assert type(group) is ProcessGroup
        dist.barrier()


@BOTH_ORDERS
def test_options_reach_the_backend_of_their_type(first):
    with alone(spec(first, "xpu:gloo"), pg_options=Options(reproducible=True)) as group:
        assert group.communicator.reproducible
    with alone(spec(first, "xpu:gloo"), pg_options=object()) as group:
        assert not group.communicator.reproducible


@BOTH_ORDERS
def test_program_may_bind_a_device(first, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: DEVICE)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with alone(spec(first, "xpu:fake"), device_id=DEVICE) as group:
        assert group.bound_device_id == DEVICE
        assert dist.new_group().bound_device_id == DEVICE


def test_error_without_a_device_names_a_solution():
    with alone("unisono"):
        text = r"expected a CPU tensor, .*on xpu:0 \(init.*'cpu:unisono,xpu:\.\.\.'\)"
        with pytest.raises(UnsupportedError, match=text):
            dist.all_reduce(on_device(1.0))


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("cpu:unisono,xpu:unisono", "not on xpu: give 'cpu:unisono,xpu:"),
        ("cpu:fake,cuda:unisono", "give 'cpu:unisono,cuda:unisono'"),
    ],
)
def test_devices_that_are_not_served_are_refused(backend, text):
    with pytest.raises(UnsupportedError, match=text):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("backend", ["cuda:unisono", "cpu:unisono,cuda:unisono"])
def test_groups_for_cuda_serve_cpu_tensors_without_a_gpu(backend):
    with alone(backend):
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [1, 1, 1]


def test_variables_that_are_read_exist():
    made = inspect.unwrap(dist.distributed_c10d._new_process_group_helper).__code__
    assert set(group_making.MAKING) <= {*made.co_varnames, *made.co_cellvars}
    batch = inspect.unwrap(dist.batch_isend_irecv).__code__
    assert "p2p_op_list" in {*batch.co_varnames, *batch.co_cellvars}
