"""Public names exist, have documentation, and are fast to import."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import unisono
from ranks import unique_name
from unisono import errors

SOURCE = Path(unisono.__file__).parent


def test_every_public_name_exists() -> None:
    for name in unisono.__all__:
        assert getattr(unisono, name) is not None
    assert sorted(unisono.__all__) == unisono.__all__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = unisono.nothing
    assert set(unisono.__all__) <= set(dir(unisono))


def test_every_error_is_public_and_in_the_tree() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert defined <= set(unisono.__all__)
    assert all(issubclass(getattr(errors, name), errors.UnisonoError) for name in defined)
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in defined)
    assert issubclass(errors.CollectiveTimeoutError, TimeoutError)
    assert issubclass(errors.CommunicationError, RuntimeError)
    assert issubclass(errors.UnsupportedError, ValueError)


@pytest.mark.parametrize(
    "module",
    [
        *("communicator", "algorithms", "schedule", "topology", "pipeline", "planner"),
        "planner.recommendation",
    ],
)
def test_every_exported_name_exists(module: str) -> None:
    package: Any = __import__(f"unisono.{module}", fromlist=["*"])
    assert all(hasattr(package, name) for name in package.__all__)


@pytest.mark.parametrize(
    "module",
    [
        "algorithms",
        "communicator",
        "schedule",
        "schedule.formats",
        "show",
        "show.network",
        "show.simulation",
        "simulator",
        "timeline",
        "topology",
        "torch_backend",
        "torch_backend.reserved",
    ],
)
def test_every_public_function_documents_an_example_and_its_errors(module: str) -> None:
    package: Any = importlib.import_module(f"unisono.{module}")
    functions = [getattr(package, name) for name in package.__all__]
    for function in filter(inspect.isfunction, functions):
        text = inspect.getdoc(function) or ""
        assert ">>> " in text, f"{module}.{function.__name__} has no example"
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        if any(isinstance(node, ast.Raise) for node in ast.walk(tree)):
            assert "Raises" in text, f"{module}.{function.__name__} does not say what it raises"


def test_every_method_of_a_communicator_is_called_in_an_example() -> None:
    text = "".join(path.read_text() for path in (SOURCE / "communicator").glob("*.py"))
    examples = "\n".join(re.findall(r"^ *(?:>>>|\.\.\.) (.*)$", text, re.MULTILINE))
    functions = inspect.getmembers(unisono.Communicator, inspect.isfunction)
    names = {name for name, _ in functions if not name.startswith("_")}
    assert "all_reduce" in names
    assert {name for name in names if f".{name}(" not in examples} == set()


_UPPER_FOLDERS = (
    "bench", "commands", "controller", "launch", "parallel", "planner", "recovery", "show",
    "simulator", "topology", "torch_backend", "train",
)  # fmt: skip
_OPTIONAL = (
    "asyncio", "cloudpickle", "cuda", "matplotlib", "mpi4py", "multiprocessing", "networkx",
    "psutil", "pynvml", "rich", "scipy", "sklearn", "ssl", "torch", "typer", "unittest",
)  # fmt: skip


def _modules_after(code: str) -> set[str]:
    """Returns the modules that a new interpreter has loaded for a program."""
    script = f"import sys; before = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_loads_only_the_errors() -> None:
    loaded = _modules_after("import unisono")
    assert {name for name in loaded if name.startswith("unisono")} == {"unisono", "unisono.errors"}
    assert not loaded & {*_OPTIONAL, "numpy", "dataclasses", "inspect", "json", "socket"}


def test_init_loads_no_package_that_it_does_not_need() -> None:
    loaded = _modules_after(
        f"import unisono; unisono.init(rank=0, size=1, rendezvous={unique_name()!r})"
    )
    assert {"numpy", "unisono._native", "unisono.communicator"} <= loaded
    assert not {name.partition(".")[0] for name in loaded} & set(_OPTIONAL)
    assert not loaded & {f"unisono.{folder}" for folder in _UPPER_FOLDERS}


def test_one_module_reads_the_environment() -> None:
    readers = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            found = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            if found and isinstance(node.value, ast.Name) and node.value.id == "os":
                readers.append(path.relative_to(SOURCE).as_posix())
    print(sorted(set(readers)))
    layers = {reader.split("/")[0] for reader in readers} - {"bench", "train"}
    assert layers == {"config"}


def test_every_variable_is_documented() -> None:
    names = set()
    for node in ast.walk(ast.parse((SOURCE / "config" / "environment.py").read_text())):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and text.startswith("UNISONO_") and text.isupper():
            names.add(text.split()[0].rstrip(",:;"))
    page = Path(__file__).parents[1] / "docs" / "environment.md"
    assert names
    assert page.exists()
    missing = [name for name in sorted(names) if f"`{name}`" not in page.read_text()]
    assert not missing
