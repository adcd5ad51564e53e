"""The environment is understood as each launcher means it; nonsense is named."""

from __future__ import annotations

import dataclasses
import os

import pytest

from unisono import config
from unisono.errors import RendezvousError, UnsupportedError


def test_the_variables_of_unisono() -> None:
    environ = {"UNISONO_RANK": "3", "UNISONO_SIZE": "8", "UNISONO_RENDEZVOUS": "job 7"}
    assert config.world(environ) == config.World(rank=3, size=8, rendezvous="job 7")
    for missing in ("UNISONO_SIZE", "UNISONO_RENDEZVOUS"):
        with pytest.raises(RendezvousError, match=f"{missing} is not set"):
            config.world({name: value for name, value in environ.items() if name != missing})


def test_torchrun() -> None:
    environ = {
        "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    found = config.world(environ)
    assert (found.rank, found.size) == (1, 4)
    # Jobs beside each other, and restarts of one, must not meet.
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        assert config.world({**environ, name: "1"}).rendezvous != found.rendezvous
    assert config.world({**environ, "RANK": "2"}).rendezvous == found.rendezvous
    with pytest.raises(UnsupportedError, match="torchrun started 8 ranks, of which 4"):
        config.world({**environ, "WORLD_SIZE": "8"})
    with pytest.raises(RendezvousError, match="no rank given"):
        config.world({"RANK": "1"})


def test_open_mpi() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "PMIX_NAMESPACE": "prterun-host-123@1",
    }  # fmt: skip
    found = config.world(environ)
    assert found == config.World(rank=2, size=3, rendezvous="openmpi:prterun-host-123@1")
    del environ["PMIX_NAMESPACE"]
    assert config.world(environ).rendezvous == f"openmpi:parent-{os.getppid()}"
    with pytest.raises(UnsupportedError, match="mpiexec started 6 ranks, of which 3"):
        config.world({**environ, "OMPI_COMM_WORLD_SIZE": "6"})


def test_mpich() -> None:
    environ = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    found = config.world(environ)
    assert found == config.World(rank=0, size=2, rendezvous=f"mpich:{os.getppid()}")
    with pytest.raises(UnsupportedError, match="mpiexec started 2 ranks, of which 1"):
        config.world({**environ, "MPI_LOCALNRANKS": "1"})
    # In a Slurm job, whose variables are the job's and not the rank's.
    assert config.world({**environ, "PMI_RANK": "1", "SLURM_PROCID": "0"}).rank == 1
    # A descriptor that is closed, or something else, is no reason to fail.
    for number in ("1000000", "-1", "x", str(os.open(os.devnull, os.O_RDONLY))):
        assert config.world({**environ, "PMI_FD": number}) == found


def test_slurm() -> None:
    environ = {
        "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS": "12",
        "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2",
    }  # fmt: skip
    assert config.world(environ) == config.World(rank=5, size=6, rendezvous="slurm:77.2")
    # srun sets the variables of PMI too.
    assert config.world({**environ, "PMI_RANK": "5", "PMI_SIZE": "6"}).rendezvous == "slurm:77.2"
    assert config.world({**environ, "SLURM_STEP_ID": "3"}).rendezvous == "slurm:77.3"
    del environ["SLURM_STEP_NUM_TASKS"]
    assert config.world(environ).size == 12
    with pytest.raises(UnsupportedError, match="srun started 12 ranks"):
        config.world({**environ, "SLURM_STEP_NUM_NODES": "2"})


def test_the_nearest_launcher_counts() -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "1"}
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    torchrun = {"RANK": "2", "WORLD_SIZE": "3"}
    own = {"UNISONO_RANK": "3", "UNISONO_SIZE": "4", "UNISONO_RENDEZVOUS": "x"}
    assert config.world(slurm | mpi | torchrun | own).rank == 3
    assert config.world(slurm | mpi | torchrun).rank == 2
    assert config.world(slurm | mpi).rank == 1
    assert config.world(slurm).rank == 0


def test_without_a_launcher_the_ways_to_start_are_named() -> None:
    with pytest.raises(RendezvousError, match=r"unisono\.run.*torchrun, mpiexec or srun"):
        config.world({})


@pytest.mark.parametrize("value", ["", "two", "1.5", "0x1"])
def test_numbers_that_are_none(value: str) -> None:
    with pytest.raises(ValueError, match=f"WORLD_SIZE must be a whole number, not {value!r}"):
        config.world({"RANK": "0", "WORLD_SIZE": value})


def test_export_is_what_world_reads() -> None:
    environ: dict[str, str] = {}
    world = config.World(rank=1, size=3, rendezvous="a b:c")
    config.export(world, environ)  # type: ignore[arg-type]
    assert config.world(environ) == world


def test_settings() -> None:
    assert config.settings({}) == config.Settings()
    assert config.settings({}).timeout_s == 300
    found = config.settings({"UNISONO_TIMEOUT_S": "0.5", "UNISONO_STAGING_BYTES": "65536"})
    assert (found.timeout_s, found.staging_bytes) == (0.5, 65536)
    assert config.override(found, timeout_s=7) == dataclasses.replace(found, timeout_s=7)
    assert config.override(found) == found
    assert not found.reproducible
    assert config.override(found, reproducible=True).reproducible
    asked = config.settings({"UNISONO_REPRODUCIBLE": "1"})
    assert asked.reproducible and config.override(asked).reproducible
    assert not config.override(asked, reproducible=False).reproducible


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UNISONO_TIMEOUT_S", "0"), ("UNISONO_TIMEOUT_S", "-1"), ("UNISONO_TIMEOUT_S", "nan"),
        ("UNISONO_TIMEOUT_S", "soon"), ("UNISONO_STAGING_BYTES", "1"),
        ("UNISONO_STAGING_BYTES", "16M"), ("UNISONO_STAGING_BYTES", str(1 << 40)),
        ("UNISONO_STORES", "magic"), ("UNISONO_REPRODUCIBLE", "yes"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        config.settings({name: value})
