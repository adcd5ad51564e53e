"""The packages that the tasks of `unisono train` need."""

from __future__ import annotations

import importlib.util

from unisono.errors import UnsupportedError

_PIP_NAMES = {"torch": "torch", "sklearn": "scikit-learn"}


def require_packages(task: str) -> None:
    """Raises `UnsupportedError`, which names the packages, if the task needs missing packages."""
    needed = ("torch", "sklearn") if task == "digits" else ("torch",)
    missing = [_PIP_NAMES[name] for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        extra = "train" if "sklearn" in needed else "torch"
        raise UnsupportedError(
            f"unisono train {task} needs {' and '.join(missing)}, not installed here: "
            f"pip install 'unisono[{extra}]'"
        )
