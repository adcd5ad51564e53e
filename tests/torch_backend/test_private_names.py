"""Torch's private names: they exist, and only `torch_backend/private/` uses them."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402

import unisono  # noqa: E402
from unisono.torch_backend import (  # noqa: E402
    drop_probability,
    gradient_hooks,
    has_hooks,
    hooks_before,
    missing_methods,
    own_buffers,
    own_children,
    own_parameters,
    saved_by,
    version_of,
)
from unisono.torch_backend.pending_work import PendingWork  # noqa: E402
from unisono.torch_backend.private import WorkBase  # noqa: E402
from unisono.torch_backend.private.names import PRIVATE_NAMES, WHERE_MISSING  # noqa: E402
from unisono.torch_backend.process_group import ProcessGroup  # noqa: E402

pytestmark = pytest.mark.torch

SOURCE = Path(unisono.__file__).parent
PRIVATE = SOURCE / "torch_backend" / "private"
BY_TEXT = {"getattr", "hasattr", "setattr"}


def resolve(dotted):
    """Returns the object with a dotted name, after importing the parts that are modules."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(dotted)


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_private_name_exists(name):
    if name in WHERE_MISSING and not torch.__version__.startswith("2.13."):
        return  # each other version lacks some of these names
    resolve(name)


def test_private_name_resolver_notices_a_missing_name():
    with pytest.raises(AttributeError):
        resolve("torch._C._distributed_c10d.Work.no_such_method")


def test_only_listed_names_may_be_missing():
    assert set(WHERE_MISSING) <= set(PRIVATE_NAMES)


@pytest.mark.parametrize("base", [dist.ProcessGroup, WorkBase])
def test_private_methods_that_we_override_are_listed(base):
    assert overridden(base) <= {name.rpartition(".")[2] for name in PRIVATE_NAMES}


def overridden(base):
    """Returns the private methods of a class of torch that ours implement."""
    ours = [cls for cls in (*ProcessGroup.__mro__, PendingWork) if "unisono" in cls.__module__]
    found = {name for cls in ours for name in vars(cls) if hasattr(base, name)}
    return {
        name
        for name in found
        if is_private(name) and not is_refused(getattr(ProcessGroup, name, None))
    }


def is_private(name):
    return name[0] == "_" and not name.startswith("__")


def is_refused(method):
    return getattr(method, "__module__", "") == missing_methods.__name__


# ---- where they are used


def names_of_torch():
    """Returns the private attributes of torch's objects that this project handles, except for the
    methods of its own process groups."""
    x = torch.ones(2, 2, requires_grad=True)
    linear = torch.nn.Linear(2, 2)
    normalized = torch.nn.functional.batch_norm(x, None, None, training=True)
    objects = (
        x, x.untyped_storage(), (x * x).grad_fn, normalized.grad_fn,
        torch.nn.Sequential(linear), torch.optim.SGD(linear.parameters()),
        torch.nn.parallel.DistributedDataParallel, dist.ProcessGroup, WorkBase, dist.Store,
        dist.ProcessGroupGloo, dist.ProcessGroupGloo._Options, dist.distributed_c10d,
        dist.distributed_c10d._world, torch.autograd, torch._C, torch.ops.aten, torch.nn.modules,
        torch.distributed.fsdp.FSDPModule, torch.profiler.profile,
    )  # fmt: skip
    names = {name for each in objects for name in dir(each) if is_private(name)}
    return names - overridden(dist.ProcessGroup) - overridden(WorkBase)


def uses(source, of_torch):
    """Yields each line of a source file that uses a private name of torch, and the name.

    A name counts if it is imported from torch, if it follows a name that is imported from torch, or
    if it is an attribute of torch's objects and no attribute of a class of the file. It also counts
    as a text in `getattr`, `hasattr` or `setattr`.
    """
    tree = ast.parse(source)
    imported = imports_of_torch(tree)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    of_torch = of_torch.difference(*map(attributes, classes))
    for line, dotted in imported.values():
        if any(map(is_private, dotted.split("."))):
            yield line, dotted
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in BY_TEXT:
            texts = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
            yield from ((node.lineno, text) for text in texts if text in of_torch)
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            on = ast.unparse(node.value)
            is_own = on in {"self", "cls", "super()"}
            if root(node) in imported or (node.attr in of_torch and not is_own):
                yield node.lineno, node.attr


def imports_of_torch(tree):
    """Returns the line and the dotted name of each import from torch, by its name in the file."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            pairs = [(each.asname or each.name.split(".")[0], each.name) for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            pairs = [
                (each.asname or each.name, f"{node.module}.{each.name}") for each in node.names
            ]
        else:
            continue
        found |= {
            name: (node.lineno, dotted) for name, dotted in pairs if dotted.split(".")[0] == "torch"
        }
    return found


def root(node):
    """Returns the name with which a chain of attributes and calls begins; "" without a name."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def attributes(cls):
    """Returns the names of a class's fields, methods, and attributes of `self`."""
    found = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(cls):
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for each in targets:
                if isinstance(each, ast.Name):
                    found.add(each.id)
                elif isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
                    found.add(each.attr)
    return found


def test_only_the_folder_of_private_names_uses_them():
    of_torch = names_of_torch()
    found = [
        f"{path.relative_to(SOURCE)}, line {line}: {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        if PRIVATE not in path.parents and "torch" in (source := path.read_text())
        for line, name in uses(source, of_torch)
    ]
    assert not found, "move these uses to torch_backend/private:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch._C import _profiler", "torch._C._profiler"),
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch\ntorch._C.thing()", "_C"),
        ("from torch import nn\nnn.modules.dropout._DropoutNd", "_DropoutNd"),
        ("def changes(tensor): return tensor._version", "_version"),
        ("def f(node): return getattr(node, '_saved_training', False)", "_saved_training"),
        ("class A:\n    def f(self): return self.model._buffers", "_buffers"),
    ],
)
def test_uses_are_found(source, name):
    assert name in [found for _, found in uses(source, names_of_torch())]


def test_own_attributes_are_no_uses():
    source = "class A:\n    def f(self, other):\n        self._version = other._version"
    assert not list(uses(source, names_of_torch()))


# ---- attributes of torch's objects, which have no dotted name


def test_tables_of_modules():
    whole = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    assert own_children(whole) == {"0": whole[0], "1": whole[1]}
    assert own_parameters(whole[0]) == {"weight": whole[0].weight, "bias": whole[0].bias}
    assert list(own_buffers(whole[1])) == ["running_mean", "running_var", "num_batches_tracked"]
    assert own_buffers(whole[1])["running_mean"] is whole[1].running_mean
    assert drop_probability(torch.nn.Dropout2d(0.25)) == 0.25
    assert drop_probability(whole) == 0


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_hooks_of_modules_are_found(kind):
    module = torch.nn.Linear(1, 1)
    assert not has_hooks(module)

    def hook(*_):
        return None

    handle = getattr(module, f"register_{kind}_hook")(hook)
    assert has_hooks(module)
    assert hooks_before(module) == [hook] * (kind == "forward_pre")
    handle.remove()
    assert not has_hooks(module)


def test_versions_and_hooks_of_tensors():
    x = torch.ones(2, requires_grad=True)
    x.register_hook(abs)
    x.register_post_accumulate_grad_hook(print)
    before, after = gradient_hooks(x)
    assert [*before.values(), *after.values()] == [abs, print]
    y, first = x.detach(), version_of(x)
    y.add_(1)
    assert version_of(y) == first + 1


@pytest.mark.parametrize("is_training", [True, False])
def test_values_that_operations_have_saved(is_training):
    x = torch.ones(2, 3, requires_grad=True)
    statistics = torch.zeros(3), torch.ones(3)
    node = torch.nn.functional.batch_norm(x, *statistics, training=is_training).grad_fn
    assert saved_by(node, "training") is is_training
    assert torch.equal(saved_by(node, "input"), x)
    embedding = torch.nn.functional.embedding
    node = embedding(torch.tensor([0]), x, sparse=is_training, scale_grad_by_freq=is_training)
    assert saved_by(node.grad_fn, "sparse") is is_training
    assert saved_by(node.grad_fn, "scale_grad_by_freq") is is_training
