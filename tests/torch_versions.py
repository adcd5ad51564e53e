"""Runs the torch tests with several versions of torch, each in an environment of its own.

    python tests/torch_versions.py ==2.9.0 '>=2.9'

The environment is `build/torch/VERSION`, or `build/torch/newest` for a requirement such as `>=2.9`.
It contains the newest version that the requirement permits, from PyPI: pip's configuration is
ignored, except for its certificates, since it may prefer another build of torch. All environments
install the same wheel of unisono, which is built once.

Prints the skipped tests by their reasons, and one line per version at the end. The exit status is 1
if a test of any version failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

_ROOT = Path(__file__).parents[1]
_FOLDER = _ROOT / "build" / "torch"
_PACKAGES = (
    "numpy>=1.26", "cloudpickle>=3", "psutil>=5.9", "typer>=0.12", "rich>=13", "scikit-learn>=1.4",
    "matplotlib>=3.8", "networkx>=3.2", "pytest>=8", "hypothesis>=6", "pytest-timeout>=2",
    "pytest-xdist>=3.6", "pyyaml>=6", "jinja2>=3", "jsonschema>=4", "safetensors>=0.5",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The tests of one version of torch."""

    torch: str
    status: int
    """The exit status of pytest."""
    passed: int
    failed: list[str]
    skipped: dict[str, list[str]]
    """The tests that were skipped, by reason."""
    minutes: float

    @property
    def is_success(self) -> bool:
        return self.status == 0 and self.passed > 0 and not self.failed

    def line(self) -> str:
        """Returns a summary in one line."""
        skips = Counter({why: len(tests) for why, tests in self.skipped.items()})
        old = sum(count for why, count in skips.items() if is_about_torch(why))
        return (
            f"torch {self.torch}: {'passed' if self.is_success else 'FAILED'}; "
            f"{self.passed} passed, {len(self.failed)} failed, {skips.total()} skipped "
            f"({old} for the version of torch), {self.minutes:.0f} min"
        )


def is_about_torch(reason: str) -> bool:
    """Returns True if a test was skipped for the version of torch."""
    return re.search(r"needs torch \d|^torch \d\S* (is older|has no)", reason) is not None


def main(requirements: list[str]) -> int:
    """Returns the exit status."""
    wheel = _build()
    results = [_tested(requirement, wheel) for requirement in requirements]
    for result in results:
        for reason, tests in sorted(result.skipped.items()):
            print(f"torch {result.torch}: {len(tests)} skipped: {reason}: {', '.join(tests)}")
    for result in results:
        for test in result.failed:
            print(f"torch {result.torch}: failed: {test}")
    print("\n".join(result.line() for result in results))
    return 0 if results and all(result.is_success for result in results) else 1


def _build() -> Path:
    """Returns a wheel of this project, built with this interpreter's packages."""
    wheels = _FOLDER / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    build = ["wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", str(wheels)]
    core = ["-C", "build-dir=build/dev"]  # of the Makefile, where the core is compiled already
    subprocess.run([sys.executable, "-m", "pip", *build, *core, "."], cwd=_ROOT, check=True)
    [wheel] = wheels.glob("*.whl")
    return wheel


def _tested(requirement: str, wheel: Path) -> Result:
    """Runs the tests with the newest torch that a requirement permits."""
    exact = re.sub(r"[^\d.]", "", requirement).strip(".")
    folder = _FOLDER / (exact if requirement.startswith("==") else "newest")
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
    packages = ["--upgrade", f"torch{requirement}", *_PACKAGES]
    subprocess.run([*pip, *packages], env=environment, check=True)
    again = ["--no-deps", "--force-reinstall", str(wheel)]
    subprocess.run([*pip, *again], env=environment, check=True)
    report = folder / "tests.xml"
    report.unlink(missing_ok=True)
    begin_s = time.monotonic()
    tests = [
        str(python), "-m", "pytest", "-q", "-m", "torch and not slow", "-n", "2",
        "--dist", "worksteal", "--timeout", "600", f"--junitxml={report}", str(_ROOT / "tests"),
    ]  # fmt: skip
    status = subprocess.run(tests, env=environment, check=False, cwd=_ROOT).returncode
    minutes = (time.monotonic() - begin_s) / 60
    version = "from importlib.metadata import version; print(version('torch'))"
    found = subprocess.run([python, "-c", version], capture_output=True, text=True, check=True)
    return read_report(report, torch=found.stdout.strip(), status=status, minutes=minutes)


def read_report(report: Path, *, torch: str, status: int, minutes: float) -> Result:
    """Returns the results in a file that pytest wrote; no tests if it wrote none."""
    passed, failed, skipped = 0, [], {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        test = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(test)
        elif skip is not None:
            skipped.setdefault(skip.get("message", ""), []).append(test)
        else:
            passed += 1
    return Result(
        torch=torch, status=status, passed=passed, failed=failed, skipped=skipped, minutes=minutes
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
