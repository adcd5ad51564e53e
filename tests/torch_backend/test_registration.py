"""Registration of the backend and its groups with torch, and the methods of a group."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402

from unisono import torch_backend  # noqa: E402
from unisono.torch_backend import missing_methods, reserved  # noqa: E402
from unisono.torch_backend.private import group_tables  # noqa: E402
from unisono.torch_backend.process_group import ProcessGroup  # noqa: E402

pytestmark = pytest.mark.torch

# Methods of torch's ProcessGroup that torch's C++ code implements for this backend.
INHERITED = {
    "bound_device_id",
    "boxed",
    "group_desc",
    "group_name",
    "rank",
    "size",
    "unbox",
    "use_pg_for_symm_mem_rendezvous",
    # False, in torch 2.15
    "supports_abort_hooks",
    "supports_completion_hooks",
    "supports_reconfigure",
    "supports_window",
}
# Methods that only other backends support. All but the first are new in torch 2.15.
REFUSED = {
    "merge_remote_group",
    "get_reconfigure_handle",
    "new_window",
    "reconfigure",
    "register_abort_hook",
    "register_post_hook",
    "register_pre_hook",
    "unregister_abort_hook",
    "unregister_post_hook",
    "unregister_pre_hook",
}


def tables_of_torch():
    """Returns the registered groups of torch, each as its class and name."""
    world = dist.distributed_c10d._world
    named = {group: f"{type(group)} {name}" for group, name in world.pg_names.items()}
    tables = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config)
    found = [
        {named[key]: str(value) for key, value in table.items()}
        for table in (*tables, world.pg_to_tag)
    ]
    tags = {tag: [named[key] for key in keys] for tag, keys in world.tags_to_pg.items()}
    return re.sub(r" at 0x\w+", "", repr((found, tags)))


@pytest.mark.parametrize("name", ["_register_pg_in_world", "_cleanup_process_group_global_state"])
def test_groups_are_registered_and_forgotten_as_by_torch(monkeypatch, name):
    if not hasattr(dist.distributed_c10d, name):
        pytest.skip(f"torch {torch.__version__} has no {name} to compare with")
    seen = []
    for _ in range(2):
        dist.init_process_group(
            "cpu:unisono,xpu:gloo", store=dist.HashStore(), rank=0, world_size=1
        )
        reserved.split_group(dist.new_group(backend="unisono"), [[0]])
        seen.append(tables_of_torch())
        dist.destroy_process_group()
        kept = {each: found for each, found in vars(dist.distributed_c10d).items() if each != name}
        monkeypatch.setattr(group_tables, "_torch_groups", SimpleNamespace(**kept))
    assert seen[0] == seen[1]


def test_a_newer_torch_is_logged_once(monkeypatch, caplog):
    torch_backend._log_untested_torch.cache_clear()
    monkeypatch.setattr(torch, "__version__", "3.1.0+cpu")
    for _ in range(2):
        torch_backend._log_untested_torch()
    torch_backend._log_untested_torch.cache_clear()
    assert caplog.text.count("torch 3.1.0+cpu is newer than torch 2.15") == 1


def test_every_public_method_of_a_process_group_is_covered():
    public = {name for name in dir(dist.ProcessGroup) if not name.startswith("_")}
    constants = set(dist.ProcessGroup.BackendType.__members__) | {"BackendType"}
    ours = {name for cls in ProcessGroup.__mro__ for name in vars(cls) if "unisono" in str(cls)}
    assert public - constants - INHERITED - ours == set()
    assert {name for name in public if _is_refused(getattr(ProcessGroup, name))} == (
        public & REFUSED
    )


def _is_refused(method):
    return getattr(method, "__module__", "") == missing_methods.__name__


@pytest.mark.parametrize(
    "name",
    [
        "_allgather_base",
        "_reduce_scatter_base",
        "alltoall_base",
        "allgather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced",
        "all_gather_single",
        "reduce_scatter_single",
        "all_to_all_single",
        "all_gather_single_coalesced",
        "reduce_scatter_single_coalesced",
    ],
)
def test_old_and_new_method_names_are_implemented(name):
    assert any(name in vars(cls) for cls in ProcessGroup.__mro__ if "unisono" in cls.__module__)


def test_reduce_ops_hash_by_their_operation():
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    assert hash(options.reduceOp) == hash(dist.ReduceOp(dist.ReduceOp.MAX))
    assert hash(options.reduceOp) != hash(dist.ReduceOp(dist.ReduceOp.MIN))


def test_registering_twice_does_nothing():
    torch_backend.register()
    torch_backend.register()
    assert dist.Backend.backend_list.count("unisono") == 1
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert dist.Backend.backend_capability["unisono"] == torch_backend._devices()


def test_autoload_never_fails(monkeypatch, caplog):
    def broken():
        raise RuntimeError("a torch without distributed")

    monkeypatch.setattr(torch_backend, "register", broken)
    torch_backend._autoload()
    assert "a torch without distributed" in caplog.text


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


ONE_RANK = """
import torch, torch.distributed as dist
dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.destroy_process_group()
print(tensor.tolist())
"""


def test_works_without_an_import():
    if not any(entry.name == "unisono" for entry in entry_points(group="torch.backends")):
        pytest.skip("the package's entry points are not installed")
    result = run_python(ONE_RANK)
    assert result.stdout == "[1.0, 1.0, 1.0]\n", result.stderr


def test_newer_torch_finds_the_backend_where_autoload_is_off():
    if not hasattr(dist.Backend, "_ensure_backend_registered"):
        pytest.skip("before torch 2.15 torch has no registry of backends")
    result = run_python(ONE_RANK, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.stdout == "[1.0, 1.0, 1.0]\n", result.stderr


def test_works_with_an_import_where_autoload_is_off():
    code = "import unisono.torch_backend\n" + ONE_RANK
    result = run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.stdout == "[1.0, 1.0, 1.0]\n", result.stderr


def test_registering_loads_nothing_native_and_starts_no_thread():
    code = """
import sys, threading, torch
import unisono.torch_backend
assert "unisono.torch_backend.process_group" not in sys.modules
assert "unisono._native" not in sys.modules
assert threading.active_count() == 1
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_importing_the_backend_without_torch_says_so():
    code = "import sys; sys.modules['torch'] = None; import unisono.torch_backend"
    assert "ModuleNotFoundError" in run_python(code).stderr


def test_unknown_options_are_refused():
    code = ONE_RANK.replace("world_size=1", "world_size=1, pg_options=object()")
    result = run_python("import unisono.torch_backend\n" + code)
    assert "UnsupportedError: pg_options: expected unisono.torch_backend.Options" in result.stderr
