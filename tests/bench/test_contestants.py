from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from unisono.bench.contestants import Contestant, mpi_command, plan_launch, reason_missing


def test_an_algorithm_can_be_forced() -> None:
    ring = Contestant(name="unisono:ring")
    assert (ring.base, ring.algorithm) == ("unisono", "ring")
    assert Contestant(name="unisono").algorithm is None


@pytest.mark.parametrize("name", ["nccl", "gloo:ring", ""])
def test_unknown_contestants_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"contestant|algorithm"):
        Contestant(name=name)


def test_gloo_has_one_process_per_rank() -> None:
    commands = plan_launch(Contestant(name="gloo"), ranks=3, folder=Path("/folder"), bind=False)
    assert len(commands) == 3
    assert commands[2][-2:] == ("--rank", "2")
    assert "GLOO_SOCKET_IFNAME=lo" in commands[0]


@pytest.mark.parametrize(
    ("name", "launcher", "library"),
    [
        ("openmpi", "ompirun_wrapper", "libmpi.so.40"),
        ("mpich", "mpiexec.hydra", "libmpi.so.12"),
    ],
)
def test_each_mpi_starts_with_its_own_files(name: str, launcher: str, library: str) -> None:
    contestant = Contestant(name=name)
    if reason_missing(contestant) is not None:
        pytest.skip(f"{name} is not installed")
    (command,) = plan_launch(contestant, ranks=3, folder=Path("/folder"), bind=False)
    assert any(Path(word).name == launcher for word in command)
    (setting,) = (word for word in command if word.startswith("MPI4PY_LIBMPI="))
    assert setting.endswith(library)


def test_intel_mpi_is_in_the_folder_that_its_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mpi4py")
    intel = Contestant(name="impi")
    monkeypatch.delenv("I_MPI_ROOT", raising=False)
    assert reason_missing(intel) == "requires: I_MPI_ROOT, the folder of Intel MPI"
    monkeypatch.setenv("I_MPI_ROOT", str(tmp_path))
    assert "has no bin/mpiexec.hydra" in str(reason_missing(intel))
    for file in ("bin/mpiexec.hydra", "lib/libmpi.so.12"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert reason_missing(intel) is None
    (command,) = plan_launch(intel, ranks=2, folder=Path("/folder"), bind=False)
    assert f"MPI4PY_LIBMPI={tmp_path}/lib/libmpi.so.12" in command
    assert f"I_MPI_ROOT={tmp_path}" in command
    assert "I_MPI_FABRICS=shm" in command
    assert str(tmp_path / "bin" / "mpiexec.hydra") in command
    with pytest.raises(LookupError, match="impi runs on one host only"):
        mpi_command("impi", ranks=2, program=["true"], options=["-hosts", "a,b"])


def test_a_missing_package_is_a_reason_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert "pip install 'unisono[peers]'" in str(reason_missing(Contestant(name="mpich")))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'unisono[torch]'" in str(reason_missing(Contestant(name="gloo")))
