"""Every function of torch.distributed is called by a test, or is in a list that gives the reason
why it is not called.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import FunctionType

import pytest

pytest.importorskip("torch")

import torch.distributed.nn.functional as dist_nn
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

pytestmark = pytest.mark.torch

# Public functions of torch.distributed that a CPU group cannot support, or that do not use a group.
NOT_OURS = {
    "get_backend_impl": "returns what `_get_backend` returns: test_missing_methods",
    "record_comm": "a context manager: test_visible",
    "shrink_group": "for C++ backends: test_shrink has its equivalent",
    "get_node_local_rank": "reads the launcher's environment",
    "is_torchelastic_launched": "reads the launcher's environment",
    "is_gloo_available": "about another backend",
    "is_mpi_available": "about another backend",
    "is_nccl_available": "about another backend",
    "is_ucc_available": "about another backend",
    "is_xccl_available": "about another backend",
}


def test_every_function_of_torch_distributed_is_called_by_some_test():
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    public = {
        name
        for name in dist.distributed_c10d.__all__
        if type(getattr(dist.distributed_c10d, name, None)) is FunctionType
    }
    called = {name for name in public if re.search(rf"\bdist\.{name}\(", text)}
    assert public - called - set(NOT_OURS) == set()


@pytest.mark.parametrize(("module", "prefix"), [(dist_nn, "dist_nn"), (functional, "functional")])
def test_every_functional_collective_is_called_by_some_test(module, prefix):
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    public = {
        name
        for name, member in vars(module).items()
        if isinstance(member, FunctionType)
        and member.__module__ == module.__name__
        and not re.match(r"_|.*_(backward|setup_context|ctx)$", name)
    }
    called = {name for name in public if re.search(rf"\b{prefix}\.{name}\b", text)}
    assert public - called == set()
