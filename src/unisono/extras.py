"""The optional packages of Unisono, and the error where one is missing."""

from __future__ import annotations

from typing import Final

_EXTRAS: Final = {
    "torch": "torch",
    "sklearn": "train",
    "matplotlib": "plot",
    "networkx": "graph",
    "mpi4py": "mpi",
    "pynvml": "gpu",
    "cuda": "cuda",
    "scipy": "train",
    "safetensors": "safetensors",
    "marimo": "learn",
}
"""The extra that installs each optional module."""


def with_cure(error: ModuleNotFoundError, needing: str) -> ModuleNotFoundError:
    """Returns the error for a missing optional package, with the command that installs it. Other
    errors are returned unchanged. `needing`: the name that the program asked for.

    >>> print(with_cure(ModuleNotFoundError(name="torch"), "unisono.parallel"))
    unisono.parallel needs torch, not installed here: pip install 'unisono[torch]'
    """
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return error
    cure = f"pip install 'unisono[{_EXTRAS[package]}]'"
    text = f"{needing} needs {package}, not installed here: {cure}"
    return ModuleNotFoundError(text, name=error.name)
