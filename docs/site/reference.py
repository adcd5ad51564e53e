"""The pages of the reference: the public names of the package, with their docstrings.

A module's page has its functions and errors, and leads to the page of each class.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType

MODULES = (
    "unisono",
    "unisono.algorithms",
    "unisono.schedule",
    "unisono.topology",
    "unisono.simulator",
    "unisono.planner",
    "unisono.parallel",
    "unisono.show",
)


def write(staging: Callable[[str, str], None]) -> None:
    """Writes all pages below `reference/` by `staging(path, text)`."""
    for name in MODULES:
        module = importlib.import_module(name)
        staging(f"reference/{name}.md", _module_page(module))
        for each in classes(module):
            text = f".. autoclass:: {each}\n   :members:\n"
            page = f"---\norphan: true\n---\n# {name}.{each}\n\n{_directives(name, text)}"
            staging(f"reference/{name}.{each}.md", page)


def classes(module: ModuleType) -> list[str]:
    """Returns the public names of a module's classes that are documented with this module."""
    return [name for name, thing in _public(module) if inspect.isclass(thing) and not _error(thing)]


def _module_page(module: ModuleType) -> str:
    about = (module.__doc__ or "").split("\n\n>>>")[0].strip()
    listed = [
        f"- [`{name}`]({module.__name__}.{name}.md): {_summary(getattr(module, name))}"
        for name in classes(module)
    ]
    shown = "\n".join(
        f".. auto{'exception' if _error(thing) else 'function'}:: {name}\n"
        for name, thing in _public(module)
        if _error(thing) or not inspect.isclass(thing)
    )
    directives = _directives(module.__name__, shown) if shown else ""
    return f"# {module.__name__}\n\n{about}\n\n" + "\n".join(listed) + f"\n\n{directives}"


def _directives(module: str, text: str) -> str:
    return f"````{{eval-rst}}\n.. currentmodule:: {module}\n\n{text}````\n"


def _public(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Yields the names that this module documents: classes, errors and functions of the package
    that no module before it in `MODULES` documents.
    """
    earlier = [importlib.import_module(name) for name in MODULES]
    earlier = earlier[: earlier.index(module)]
    known = {id(getattr(each, name)) for each in earlier for name in each.__all__}
    for name in module.__all__:
        thing = getattr(module, name)
        ours = getattr(thing, "__module__", "").startswith("unisono")
        if ours and callable(thing) and id(thing) not in known:
            yield name, thing


def _error(thing: object) -> bool:
    return inspect.isclass(thing) and issubclass(thing, BaseException)


def _summary(thing: object) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
