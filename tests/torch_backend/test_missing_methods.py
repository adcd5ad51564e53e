"""Methods of torch that unisono lacks: no call may return without its transfer of data."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

from unisono.errors import UnsupportedError  # noqa: E402
from unisono.torch_backend import missing_methods, private  # noqa: E402
from unisono.torch_backend.private import placeholders  # noqa: E402
from unisono.torch_backend.process_group import ProcessGroup  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


@pytest.fixture
def group():
    """The default group of one rank, which is unisono's."""
    dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Redirected(TorchDispatchMode):
    """Calls torch's C++ operations of process groups with another group."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return operation(*tree_map(self._other, args), **tree_map(self._other, kwargs or {}))

    def _other(self, value):
        is_group = isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())
        return self.group.boxed() if is_group else value


def ones():
    return torch.ones(4)


CALLS = {
    "allreduce": lambda group: group.allreduce([ones()]),
    "allreduce_coalesced": lambda group: group.allreduce_coalesced([ones()]),
    "reduce": lambda group: group.reduce([ones()], dist.ReduceOptions()),
    "broadcast": lambda group: group.broadcast([ones()], dist.BroadcastOptions()),
    "allgather": lambda group: group.allgather([[ones()]], [ones()]),
    "allgather_coalesced": lambda group: group.allgather_coalesced([[ones()]], [ones()]),
    "_allgather_base": lambda group: group._allgather_base(ones(), ones()),
    "gather": lambda group: group.gather([[ones()]], [ones()], dist.GatherOptions()),
    "scatter": lambda group: group.scatter([ones()], [[ones()]], dist.ScatterOptions()),
    "reduce_scatter": lambda group: group.reduce_scatter([ones()], [[ones()]]),
    "_reduce_scatter_base": lambda group: group._reduce_scatter_base(ones(), ones()),
    "alltoall": lambda group: group.alltoall([ones()], [ones()]),
    "alltoall_base": lambda group: group.alltoall_base(ones(), ones(), [], []),
    "barrier": lambda group: group.barrier(),
    "send": lambda group: group.send([ones()], 0, 0),
    "recv": lambda group: group.recv([ones()], 0, 0),
    "recv_anysource": lambda group: group.recv_anysource([ones()], 0),
}


MESSAGES = ("send", "recv", "recv_anysource")


@pytest.mark.parametrize("name", CALLS)
def test_torchs_operations_raise_where_they_do_not_call_our_methods(group, name):
    of_torch = dist.ProcessGroup(dist.HashStore(), 0, 1)
    if name in MESSAGES and placeholders._PLACEHOLDERS_RAISE:
        pytest.skip("the placeholder of this torch raises for collectives only")
    with Redirected(group), pytest.raises(RuntimeError, match=r"No backend .* cpu|error_on_coll"):
        CALLS[name](of_torch)


@pytest.mark.parametrize("name", [*CALLS, "monitored_barrier", "shutdown"])
def test_backends_of_devices_refuse_calls_in_a_sentence(group, name):
    with pytest.raises(UnsupportedError, match=f"^{name}: .* a function in torch.distributed$"):
        getattr(group._get_backend(CPU), name)()


def test_backends_of_devices_answer_questions(group):
    backend = group._get_backend(CPU)
    assert (backend.rank(), backend.size()) == (0, 1)
    assert backend.supports_splitting is False
    assert backend.supports_coalescing is False
    assert backend.supports_tensor_alloc(CPU) is True
    assert not backend.supports_tensor_alloc(torch.device("cuda"))
    with pytest.raises(AttributeError):
        _ = backend.no_such_question


def test_inherited_methods_are_refused_in_a_sentence(group):
    with pytest.raises(UnsupportedError, match=r"^merge_remote_group: .* torch \d.*: use the"):
        group.merge_remote_group(dist.HashStore(), 1)


def test_methods_of_later_versions_are_refused(monkeypatch):
    class Later:
        attribute = 7

        def rank(self):
            return 3

        def transfer(self):
            """Returns as if it had transferred data."""

        def served(self):
            """Has an implementation in the subclass."""

    class Ours(Later):
        def served(self):
            return "served"

    monkeypatch.setattr(missing_methods, "ProcessGroupBase", Later)
    missing_methods.refuse_missing_methods(Ours)
    assert (Ours().attribute, Ours().rank(), Ours().served()) == (7, 3, "served")
    with pytest.raises(UnsupportedError, match=r"^transfer: "):
        Ours().transfer()


def test_every_method_of_torch_is_ours_or_refused_or_works_for_every_group():
    base = dist.ProcessGroup
    for name in set(dir(base)) - private.GROUP_METHODS:
        member = getattr(base, name)
        if callable(member) and not isinstance(member, type) and not name.startswith("__"):
            assert getattr(ProcessGroup, name) is not member, name
