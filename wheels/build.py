"""Builds the sdist, and from the sdist all wheels, into dist/, and audits the wheels.

`make wheels` installs requirements.txt and runs this file. No container is needed: `ziglang`
compiles for both architectures, against the symbols of glibc 2.28.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import ziglang

_PROJECT = Path(__file__).parents[1]
_BIN = Path(sys.executable).parent
_ARCHITECTURES = ("x86_64", "aarch64")
# The stable ABI of 3.12 is the first that nanobind can use. Its wheel serves all later versions.
_PYTHONS = ("3.11", "3.12")
_GLIBC_MINOR = 28  # that of zig.cmake
_LARGEST_WHEEL_BYTES = 3_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=_PROJECT / "dist")
    parser.add_argument("--python", action="append", choices=_PYTHONS, help="default: all")
    parser.add_argument(
        "--architecture", action="append", choices=_ARCHITECTURES, help="default: both"
    )
    chosen = parser.parse_args()
    pythons = {version: _interpreter(version) for version in chosen.python or _PYTHONS}
    shutil.rmtree(chosen.out, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--sdist", "--outdir", chosen.out, _PROJECT)
    (sdist,) = chosen.out.glob("*.tar.gz")
    for version, python in pythons.items():
        for architecture in chosen.architecture or _ARCHITECTURES:
            with tempfile.TemporaryDirectory() as built:
                wheel = _build(sdist, Path(built), version, python, architecture)
                _audit(wheel, chosen.out, architecture)
    for path in sorted(chosen.out.iterdir()):
        print(f"{path.stat().st_size:>9} bytes  {path.name}")


def _interpreter(version: str) -> Path:
    """Returns a CPython of this version: of the PATH, or of pyenv."""
    name = f"python{version}"
    on_path = shutil.which(name)
    candidates = [Path(on_path)] if on_path else []
    candidates += Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}")
    probe = "import os, sysconfig; assert os.path.exists(sysconfig.get_config_h_filename())"
    for candidate in candidates:
        if (
            subprocess.run([candidate, "-c", probe], capture_output=True, check=False).returncode
            == 0
        ):
            return candidate
    sys.exit(
        f"expected {name} with its headers on the PATH or in ~/.pyenv/versions, found none: "
        "install it"
    )


def _build(sdist: Path, folder: Path, version: str, python: Path, architecture: str) -> Path:
    """Builds one wheel with the tag linux_ARCHITECTURE. CPython's headers are alike on all 64-bit
    Linux, and an extension does not link libpython, so `python` serves both architectures.
    """
    cpython = f"cpython-{version.replace('.', '')}"
    zig = Path(ziglang.__file__).with_name("zig")
    environment = {
        "ZIG": str(zig),
        "UNWINDER": str(_unwinder(zig, folder, architecture)),
        "WHEEL_ARCHITECTURE": architecture,
        "SETUPTOOLS_EXT_SUFFIX": f".{cpython}-{architecture}-linux-gnu.so",
    }
    settings = [
        f"cmake.define.CMAKE_TOOLCHAIN_FILE={_PROJECT / 'wheels' / 'zig.cmake'}",
        # The wheel's tag. In the environment of pip, the variable would also choose NumPy's wheel.
        f"env._PYTHON_HOST_PLATFORM=linux-{architecture}",
        "install.strip=false",  # `strip` is of this machine; the linker has stripped already
    ]
    options = [part for setting in settings for part in ("-C", setting)]
    _run(
        *(
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "wheel",
            "--no-deps",
            "--wheel-dir",
            folder,
        ),
        *(*options, sdist),
        **environment,
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unwinder(zig: Path, folder: Path, architecture: str) -> Path:
    """Links the stand-in for libgcc_s.so.1 that libgcc_s.c describes."""
    library, source = folder / "libgcc_s.so.1", _PROJECT / "wheels" / "libgcc_s.c"
    symbols = f"-Wl,-soname,{library.name},--version-script,{source.with_suffix('.map')}"
    target = f"{architecture}-linux-gnu.2.28"
    _run(zig, "cc", "-target", target, "-shared", "-fno-builtin", symbols, "-o", library, source)
    return library


def _audit(wheel: Path, out: Path, architecture: str) -> None:
    """Checks symbols, licences and size, and writes the wheel to `out` with its manylinux tag."""
    if "-abi3-" in wheel.name:
        _run(_BIN / "abi3audit", "--strict", "--summary", wheel)
    # `auto`, because auditwheel names platforms of other architectures only by itself.
    _run(_BIN / "auditwheel", "repair", "--only-plat", "--plat", "auto", "--wheel-dir", out, wheel)
    (repaired,) = out.glob(wheel.name.replace("-linux_", "-manylinux_*_"))
    glibc = re.search(r"manylinux_2_(\d+)", repaired.name)
    if glibc is None or int(glibc[1]) > _GLIBC_MINOR:
        sys.exit(f"{repaired.name}: expected manylinux_2_{_GLIBC_MINOR} or older")
    with zipfile.ZipFile(repaired) as archive:
        texts = {name.rpartition("/licenses/")[2] for name in archive.namelist()}
    missing = set(re.findall(r"\w+\.txt", (_PROJECT / "NOTICE").read_text())) - texts
    if missing:
        sys.exit(f"{repaired.name}: NOTICE names licence texts that it lacks: {sorted(missing)}")
    size = repaired.stat().st_size
    if size > _LARGEST_WHEEL_BYTES:
        sys.exit(f"{repaired.name}: expected at most {_LARGEST_WHEEL_BYTES} bytes, found {size}")


def _run(*command: str | Path, **environment: str) -> None:
    path = os.pathsep.join((str(_BIN), os.environ["PATH"]))  # auditwheel calls patchelf
    try:
        subprocess.run(command, env={**os.environ, "PATH": path, **environment}, check=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"exit status {error.returncode}: {shlex.join(map(str, command))}")


if __name__ == "__main__":
    main()
