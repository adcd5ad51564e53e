"""The library reads each launcher's environment variables correctly; errors name invalid values."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from unisono import config
from unisono.config import environment
from unisono.errors import RendezvousError

NOWHERE = r"started \d+ ranks on several hosts, .* set UNISONO_RENDEZVOUS=tcp://HOST:PORT"


def test_variables_of_unisono_are_read() -> None:
    environ = {"UNISONO_RANK": "3", "UNISONO_SIZE": "8", "UNISONO_RENDEZVOUS": "job 7"}
    assert config.launched_rank(environ) == config.LaunchedRank(rank=3, size=8, rendezvous="job 7")
    for missing in ("UNISONO_SIZE", "UNISONO_RENDEZVOUS"):
        with pytest.raises(RendezvousError, match=f"{missing} is not set"):
            config.launched_rank(
                {name: value for name, value in environ.items() if name != missing}
            )


def test_a_misspelt_variable_is_logged_once_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UNISONO_TIMEOUT", "5")
    environment._warn_once.cache_clear()
    for _ in range(2):
        config.settings()
    told = "UNISONO_TIMEOUT is not a variable that unisono reads: is it UNISONO_TIMEOUT_S?"
    assert [r.getMessage() for r in caplog.records if "TIMEOUT" in r.getMessage()] == [told]


def test_all_variables_are_known_and_documented() -> None:
    root = Path(__file__).parents[2]
    named = re.compile(r"UNISONO_[A-Z_]*[A-Z](?![A-Z_])")
    documented = set(named.findall((root / "docs" / "environment.md").read_text()))
    assert documented == config.VARIABLES
    read = {
        name for path in (root / "src").rglob("*.py") for name in named.findall(path.read_text())
    }
    assert read <= config.VARIABLES


@pytest.mark.parametrize("which", ["STORES", "SINGLE_COPY", "SOCKET_FAMILY", "TLS", "WIRE"])
def test_values_of_variables_are_documented(which: str) -> None:
    name = f"UNISONO_{which}"
    with pytest.raises(ValueError, match=f"{name} must be") as caught:
        config.settings({name: "nonsense"})
    listed = re.findall(r"must be (.*), not", str(caught.value))[0]
    values = re.split(r", | or ", listed)
    assert len(values) > 1
    page = (Path(__file__).parents[2] / "docs" / "environment.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    assert [value for value in values if f"`{value}`" not in row] == []


def test_variables_of_torchrun_are_read() -> None:
    environ = {
        "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    found = config.launched_rank(environ)
    assert (found.rank, found.size) == (1, 4)
    # Concurrent jobs must have different rendezvous, and so must restarts of one job.
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        assert config.launched_rank({**environ, name: "1"}).rendezvous != found.rendezvous
    assert config.launched_rank({**environ, "RANK": "2"}).rendezvous == found.rendezvous
    several = config.launched_rank({**environ, "WORLD_SIZE": "8"})
    assert several.rendezvous == "torch-store:127.0.0.1:29500:none"
    # With several hosts the restart count is ignored, since agents whose ranks did not fail do not
    # increase it.
    restarted = {**environ, "WORLD_SIZE": "8", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert config.launched_rank(restarted).rendezvous == several.rendezvous
    with pytest.raises(RendezvousError, match="no rank given"):
        config.launched_rank({"RANK": "1"})


@pytest.mark.parametrize("address", ["", "localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_torch_variables_with_an_address_of_one_host_mean_one_host(address: str) -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": address, "MASTER_PORT": "29500"}
    assert config.launched_rank(environ).rendezvous.startswith("torchrun:")


@pytest.mark.parametrize("address", ["job-master-0", "10.0.0.7", "2001:db8::1", "node127"])
def test_torch_variables_without_the_ranks_of_a_host_may_mean_several(address: str) -> None:
    """As in a PyTorchJob whose pods run the program without torchrun."""
    environ = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": address, "MASTER_PORT": "29500"}
    assert config.launched_rank(environ).rendezvous == f"torch-store:{address}:29500:"
    alone = {**environ, "LOCAL_WORLD_SIZE": "4"}
    assert config.launched_rank(alone).rendezvous.startswith("torchrun:")


def test_variables_of_open_mpi_are_read() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "PMIX_NAMESPACE": "prterun-host-123@1",
    }  # fmt: skip
    found = config.launched_rank(environ)
    assert found == config.LaunchedRank(rank=2, size=3, rendezvous="openmpi:prterun-host-123@1")
    # With several hosts, the rendezvous uses mpiexec's host, on which rank 0 usually runs. The
    # job's name contains this host.
    several = environ | {"OMPI_COMM_WORLD_SIZE": "6"}
    at = "tcp://host:61563/prterun-host-123@1"
    assert config.launched_rank(several).rendezvous == at
    in_slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "9"}
    assert config.launched_rank(several | in_slurm).rendezvous == at.replace("host:", "n1:")
    for job in (environ, several):
        del job["PMIX_NAMESPACE"]
    assert config.launched_rank(environ).rendezvous == f"openmpi:parent-{os.getppid()}"
    with pytest.raises(RendezvousError, match=NOWHERE):
        config.launched_rank(several)


def test_variables_of_mpich_are_read() -> None:
    environ = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    found = config.launched_rank(environ)
    assert found == config.LaunchedRank(rank=0, size=2, rendezvous=f"mpich:{os.getppid()}")
    several = environ | {"MPI_LOCALNRANKS": "1"}
    with pytest.raises(RendezvousError, match=NOWHERE):
        config.launched_rank(several)
    in_slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "9"}
    assert config.launched_rank(several | in_slurm).rendezvous.startswith("tcp://n1:6")
    # In a Slurm job, the value of SLURM_PROCID may describe the job and not the rank, so PMI_RANK
    # decides.
    assert config.launched_rank({**environ, "PMI_RANK": "1", "SLURM_PROCID": "0"}).rank == 1
    # A closed descriptor, or a descriptor that is not a socket, must not cause a failure.
    for number in ("1000000", "-1", "x", str(os.open(os.devnull, os.O_RDONLY))):
        assert config.launched_rank({**environ, "PMI_FD": number}) == found


def test_variables_of_slurm_are_read() -> None:
    environ = {
        "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS": "12",
        "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2",
    }  # fmt: skip
    assert config.launched_rank(environ) == config.LaunchedRank(
        rank=5, size=6, rendezvous="slurm:77.2"
    )
    # srun also sets the variables of PMI.
    assert (
        config.launched_rank({**environ, "PMI_RANK": "5", "PMI_SIZE": "6"}).rendezvous
        == "slurm:77.2"
    )
    assert config.launched_rank({**environ, "SLURM_STEP_ID": "3"}).rendezvous == "slurm:77.3"
    del environ["SLURM_STEP_NUM_TASKS"]
    assert config.launched_rank(environ).size == 12


def test_slurm_on_several_hosts_derives_an_address() -> None:
    environ = {
        "SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "gpu[07-08]",
    }  # fmt: skip
    place = config.launched_rank(environ).rendezvous
    assert place == "tcp://gpu07:62535/slurm.2.77"
    ports = {
        config.launched_rank(
            environ | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        ).rendezvous
        for job in range(100, 120)
        for step in (0, 1, 2, 4294967291)
    }
    # different ports for concurrent jobs
    assert len({text.split("/")[2] for text in ports}) == len(ports)
    assert all(61440 <= int(text.split("/")[2].rpartition(":")[2]) <= 65535 for text in ports)
    job_alone = environ | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": "a1,b2"}
    assert config.launched_rank(job_alone).rendezvous.startswith("tcp://a1:")
    with pytest.raises(ValueError, match=r"SLURM_STEP_NODELIST: 'n\[' is not a list of hosts"):
        config.launched_rank(environ | {"SLURM_STEP_NODELIST": "n["})
    del environ["SLURM_STEP_NODELIST"]
    with pytest.raises(RendezvousError, match=NOWHERE):
        config.launched_rank(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "1", "WORLD_SIZE": "4"},
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "x"},
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "2"},
    ],
)
def test_a_given_rendezvous_takes_precedence(environ: dict[str, str]) -> None:
    point = "tcp://10.77.0.1:29400"
    found = config.launched_rank(environ | {"UNISONO_RENDEZVOUS": point})
    assert found == config.LaunchedRank(rank=1, size=4, rendezvous=point)


def test_the_nearest_launcher_is_used() -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "1"}
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    torchrun = {"RANK": "2", "WORLD_SIZE": "3"}
    own = {"UNISONO_RANK": "3", "UNISONO_SIZE": "4", "UNISONO_RENDEZVOUS": "x"}
    assert config.launched_rank(slurm | mpi | torchrun | own).rank == 3
    assert config.launched_rank(slurm | mpi | torchrun).rank == 2
    assert config.launched_rank(slurm | mpi).rank == 1
    assert config.launched_rank(slurm).rank == 0


def test_a_missing_launcher_is_reported_with_remedies() -> None:
    with pytest.raises(RendezvousError, match=r"unisono\.run.*torchrun, mpiexec, srun or mlx"):
        config.launched_rank({})


@pytest.mark.parametrize("value", ["", "two", "1.5", "0x1"])
def test_invalid_numbers_are_named(value: str) -> None:
    with pytest.raises(ValueError, match=f"WORLD_SIZE must be a whole number, not {value!r}"):
        config.launched_rank({"RANK": "0", "WORLD_SIZE": value})


def test_exported_variables_are_read_again() -> None:
    environ: dict[str, str] = {}
    world = config.LaunchedRank(rank=1, size=3, rendezvous="a b:c")
    config.export(world, environ)  # type: ignore[arg-type]
    assert config.launched_rank(environ) == world


def test_export_to_torch_sets_the_variables_of_torchrun() -> None:
    environ = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "7"}
    world = config.LaunchedRank(rank=1, size=3, rendezvous="x")
    place = config.LocalRank(rank=0, size=2)
    config.export_to_torch(world, ("192.0.2.1", 29400), place, environ)  # type: ignore[arg-type]
    assert environ == {
        "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29400",
    }  # fmt: skip


def test_settings_are_read() -> None:
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
        ("UNISONO_RAILS", "0"), ("UNISONO_RAILS", "two"),
        ("UNISONO_STORES", "magic"), ("UNISONO_REPRODUCIBLE", "yes"),
    ],
)  # fmt: skip
def test_invalid_settings_are_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        config.settings({name: value})


def test_the_transport_is_tcp_or_mpi() -> None:
    assert config.settings({}).wire == "tcp"
    assert config.settings({"UNISONO_WIRE": "mpi"}).wire == "mpi"
    with pytest.raises(ValueError, match="UNISONO_WIRE must be tcp or mpi, not 'udp'"):
        config.settings({"UNISONO_WIRE": "udp"})


def test_with_mpi_between_hosts_the_rendezvous_is_mpi() -> None:
    environ = {"UNISONO_WIRE": "mpi", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    assert config.launched_rank(environ).rendezvous == "mpi:"
