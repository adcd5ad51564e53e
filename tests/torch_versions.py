"""Runs the torch tests with one version of torch, in an environment of its own.

    python tests/torch_versions.py ==2.9.0

The environment is `build/torch/VERSION`, or `build/torch/newest` for a requirement such as `>=2.9`.
It contains the newest version that the requirement permits, from PyPI: pip's configuration is
ignored, except for its certificates, since it may prefer another build of torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PACKAGES = (
    "numpy>=1.26", "cloudpickle>=3", "psutil>=5.9", "typer>=0.12", "rich>=13", "scikit-learn>=1.4",
    "matplotlib>=3.8", "networkx>=3.2", "pytest>=8", "hypothesis>=6", "pytest-timeout>=2",
    "pytest-xdist>=3.6", "scikit-build-core>=0.11", "nanobind>=2.4", "ninja>=1.11", "cmake>=3.25",
)  # fmt: skip


def main(requirement: str) -> int:
    """Returns the exit status of pytest."""
    exact = re.sub(r"[^\d.]", "", requirement).strip(".")
    folder = _ROOT / "build" / "torch" / (exact if requirement.startswith("==") else "newest")
    python = folder / "bin" / "python"
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith("PIP_") or k == "PIP_CERT"
    }
    environment |= {
        "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "https://pypi.org/simple",
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    if not python.exists():
        venv.create(folder, with_pip=True)
    subprocess.run(
        [*pip, "--upgrade", f"torch{requirement}", *_PACKAGES], env=environment, check=True
    )
    build = [
        "--no-build-isolation",
        "--no-deps",
        "--force-reinstall",
        "-C",
        f"build-dir={folder}/core",
    ]
    subprocess.run([*pip, *build, str(_ROOT)], env=environment, check=True)
    tests = [str(python), "-m", "pytest", "-q", "-m", "torch and not slow", "-n", "2"]
    return subprocess.run([*tests, str(_ROOT / "tests")], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
