"""The sdist, and the wheels of `make wheels` in environments without a compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import calls_at_exit
from ranks import unique_name
from unisono import _native

_PROJECT = Path(__file__).parents[1]
_DIST = _PROJECT / "dist"
_WHEELS = sorted(_DIST.glob("*.whl"))
_ARM64_PYTHON = _PROJECT / "build" / "arm64" / "python"

built = pytest.mark.skipif(not _WHEELS, reason="no wheels: `make wheels` builds them")


def _pythons() -> dict[int, str]:
    """Returns one CPython of this machine for each minor version that a wheel serves."""
    found = {sys.version_info.minor: sys.executable}
    for path in Path.home().glob(".pyenv/versions/3.*/bin/python3.*[0-9]"):
        minor = int(path.name.removeprefix("python3."))
        if minor >= 11:
            found.setdefault(minor, str(path))
    return found


def test_the_sdist_has_all_that_the_build_reads(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    script = f"import scikit_build_core.build as b; b.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=_PROJECT, check=True)
    (sdist,) = tmp_path.glob("unisono-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    read = {"CMakeLists.txt", "pyproject.toml", "README.md"}
    for folder in ("csrc", "src"):
        files = (path for path in (_PROJECT / folder).rglob("*") if path.is_file())
        read |= {path.relative_to(_PROJECT).as_posix() for path in files}
    generated = {name for name in read if "__pycache__" in name or name.endswith(".so")}
    assert read - generated <= names
    assert not {name for name in names if name.startswith((".venv", "build", "dist", "shared"))}


@built
def test_each_architecture_has_a_wheel_for_3_11_and_one_for_all_later_versions() -> None:
    tags = {tuple(path.stem.split("-")[2:]) for path in _WHEELS}
    pairs = {
        (python, abi, platform.partition("_")[2].split("_", 2)[2]) for python, abi, platform in tags
    }
    assert pairs == {
        (python, abi, architecture)
        for python, abi in (("cp311", "cp311"), ("cp312", "abi3"))
        for architecture in ("x86_64", "aarch64")
    }


@pytest.mark.parametrize("wheel", _WHEELS, ids=lambda path: path.stem)
@pytest.mark.program("nm")
def test_a_wheel_is_small_and_its_libraries_export_what_others_look_up(
    wheel: Path, tmp_path: Path
) -> None:
    assert wheel.stat().st_size < 3_000_000
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    exported = {path.name.partition(".")[0]: _names(path) for path in tmp_path.rglob("*.so")}
    assert exported.pop("_native") == {"PyInit__native"}
    (jax, mlx) = (exported.pop(f"libunisono{name}_mpi") for name in ("", "_open"))
    assert not exported
    own = {"unisono_mpi_use", "unisono_mpi_end"}
    assert {"MPIABI_Allreduce", "MPIABI_Win_create", "mpiwrapper_version_major"} | own <= jax
    assert len(jax) > 600 and all(re.match("MPIX?ABI_|mpiwrapper_|mpiabi_", e) for e in jax - own)
    assert {"MPI_Allreduce", "ompi_mpi_comm_world", "ompi_mpi_c_bool"} | own <= mlx
    assert all(re.match("MPI_|ompi_mpi_|unisono_mpi_", each) for each in mlx)
    (core,) = tmp_path.rglob("_native*.so")
    assert {"memcpy", "memmove", "memset"} <= _names(core, "--undefined-only"), (
        "the C library's are faster than zig's"
    )


def _names(library: Path, which: str = "--defined-only") -> set[str]:
    command = ["nm", "--dynamic", "--format=just-symbols", which, library]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {each.partition("@")[0] for each in done.stdout.split()}


@pytest.mark.parametrize("wheel", _WHEELS, ids=lambda path: path.stem)
def test_a_wheel_has_the_license_texts_of_what_it_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            Path(name).name: archive.read(name).decode()
            for name in archive.namelist()
            if re.search(r"\.dist-info/licenses/.", name)
        }
    assert set(re.findall(r"\w+\.txt", texts["NOTICE"])) | {"LICENSE", "NOTICE"} == set(texts)
    for library in ("libcxx", "libcxxabi", "libunwind"):
        assert "---- LLVM Exceptions to the Apache 2.0 License ----" in texts[f"{library}.txt"]
    assert "Permission is hereby granted, free of charge" in texts["zig.txt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """An environment with nothing but the wheel for its Python, which one command installed."""

    minor: int
    folder: Path

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment, which finds no other programs."""
        program, *arguments = command
        return subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=_PROJECT,
            env={**os.environ, "PATH": str(self.folder / "bin")},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip


@pytest.fixture(scope="module", params=_pythons().items(), ids=lambda item: f"3.{item[0]}")
def bare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bare:
    minor, python = request.param
    (command,) = re.findall(
        r"`(pip install [^`]* dist [^`]*)`", (_PROJECT / "README.md").read_text()
    )
    words = command.split()
    assert words[-2:] == ["unisono", "torch"]  # torch takes minutes, and what it needs is its own
    found = Bare(minor=minor, folder=tmp_path_factory.mktemp("bare"))
    subprocess.run([python, "-m", "venv", found.folder], check=True)
    done = found.run(*words[:-1], "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    return found


@built
@pytest.mark.timeout(600)
def test_a_bare_environment_needs_one_command(bare: Bare) -> None:
    done = bare.run("unisono", "check", "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "This machine works." in done.stdout
    (wheel,) = bare.folder.glob("lib/python3.*/site-packages/unisono-*.dist-info/WHEEL")
    tag = "cp311-cp311" if bare.minor == 11 else "cp312-abi3"
    assert re.search(rf"Tag: {tag}-.*{os.uname().machine}", wheel.read_text())


@built
@pytest.mark.timeout(600)
def test_a_wheel_uses_the_instruction_sets_of_the_cpu(bare: Bare) -> None:
    done = bare.run("python", "-c", "from unisono import _native; print(_native.isa())")
    assert (done.stdout, done.stderr) == (f"{_native.isa()}\n", "")


@built
@pytest.mark.timeout(600)
@pytest.mark.parametrize("call", calls_at_exit.CALLS)
def test_the_interpreter_ends_during_a_call_of_a_daemon_thread(bare: Bare, call: str) -> None:
    done = bare.run("python", "-c", calls_at_exit.program(call, unique_name()))
    assert (done.returncode, done.stderr) == (0, "")


@built
@pytest.mark.timeout(900)
@pytest.mark.program("qemu-aarch64")
@pytest.mark.skipif(
    not _ARM64_PYTHON.exists(), reason="no Python for arm64: `make test-wheels` unpacks one"
)
def test_the_aarch64_wheel_works_under_qemu(tmp_path: Path) -> None:
    (wheel,) = _DIST.glob("*-cp311-cp311-*aarch64.whl")
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", tmp_path, *platforms]
    subprocess.run([*pip, "--python-version", "3.11", "--only-binary=:all:", wheel], check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [_ARM64_PYTHON, "-m", "unisono", "check", "-n", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "This machine works." in done.stdout
