"""An environment for each framework, in an ignored folder, with Unisono from a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from frameworks import TORCH, Framework

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "integrations"
TESTED_WITH = ("pytest>=8", "pytest-timeout>=2", "hypothesis")


def make_wheel() -> Path:
    """Builds this checkout's wheel with the development environment."""
    wheels = FOLDER / "wheel"
    for old in wheels.glob("*.whl"):
        old.unlink()
    _run(
        [sys.executable, "-m", "pip", "wheel", str(ROOT), "--quiet", "--no-deps",
         "--no-build-isolation", "-w", str(wheels), "-C", f"build-dir={FOLDER / 'core'}"]
    )  # fmt: skip
    return next(wheels.glob("*.whl"))


def make_environment(framework: Framework, wheel: Path) -> Path:
    """Returns the interpreter of a framework's environment, which a first call makes."""
    folder = FOLDER / framework.environment
    python = folder / "bin" / "python"
    constraint = FOLDER / "constraints.txt"
    constraint.write_text(TORCH + "\n")
    if not python.exists():
        # Debian's python3 may lack ensurepip; its pip can still install into the environment.
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        _run([sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "pip"])
    install = [str(python), "-m", "pip", "install", "--quiet"]
    install += ["-c", str(constraint)]
    _run([*install, TORCH, "numpy>=2", *TESTED_WITH, *framework.builds_with])
    isolation = ["--no-build-isolation"] if framework.builds_with else []
    _run([*install, *isolation, *framework.packages, str(wheel)], framework.variables)
    if framework.removes:
        _run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *framework.removes])
    # pip keeps a wheel of the same version, which may be of an earlier state of the checkout
    _run([*install, "--no-deps", "--force-reinstall", str(wheel)])
    return python


def version_of(python: Path, package: str) -> str:
    """Returns the version of a package in an environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [str(python), "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def _run(command: list[str], variables: Mapping[str, str] | None = None) -> None:
    subprocess.run(command, check=True, timeout=1800, env={**os.environ, **(variables or {})})
