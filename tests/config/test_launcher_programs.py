"""`unisono.init` under the launchers that are installed on this machine, with real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootstrap_stores import free_port
from unisono.bench.contestants import mpi_command

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("openmpi", "mpich")

PROGRAM = """
import os
import numpy as np
import unisono

comm = unisono.init(timeout_s=30)
x = np.arange(1000) * (comm.rank + 1)
comm.all_reduce(x)
assert (x == np.arange(1000) * sum(range(1, comm.size + 1))).all()
os.write(1, f"rank {comm.rank} of {comm.size}\\n".encode())  # in one write
"""


def start(launcher: str, ranks: int, program: list[str]) -> subprocess.Popen[str]:
    try:
        command = mpi_command(launcher, ranks=ranks, program=program)
    except LookupError as error:
        pytest.skip(str(error))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_of(job: subprocess.Popen[str]) -> list[str]:
    """Returns the sorted output lines of the ranks, after all ranks have ended without an error."""
    try:
        output, errors = job.communicate(timeout=110)
    finally:
        job.kill()
    assert job.returncode == 0, errors
    return sorted(output.splitlines())


def all_ranks(size: int) -> list[str]:
    return [f"rank {rank} of {size}" for rank in range(size)]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_concurrent_jobs_stay_apart(launcher: str, program: Path) -> None:
    jobs = [start(launcher, ranks, [sys.executable, str(program)]) for ranks in (2, 3)]
    assert [lines_of(job) for job in jobs] == [all_ranks(2), all_ranks(3)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_start_through_a_shell_script(launcher: str, program: Path) -> None:
    script = program.with_suffix(".sh")  # the parent process of each rank is a separate shell
    script.write_text(f"'{sys.executable}' '{program}'\nexit $?\n")
    assert lines_of(start(launcher, 3, ["sh", str(script)])) == all_ranks(3)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_example_runs(launcher: str) -> None:
    (line,) = lines_of(start(launcher, 4, [sys.executable, str(ROOT / "examples/pi.py")]))
    assert line.startswith("pi is 3.14159265")
    assert line.endswith(", 4 ranks")


def by_slurm(rank: int, size: int, step: int, hosts: int) -> dict[str, str]:
    """Returns the variables that srun gives to a rank of a job step on this machine, which stands
    for `hosts` hosts.
    """
    names = ["127.0.0.1", *(f"host{number}" for number in range(1, hosts))]
    set_by_srun = {
        "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_NUM_NODES": hosts,
        "SLURM_JOB_ID": os.getpid(), "SLURM_STEP_ID": step,
        "SLURM_STEP_NODELIST": ",".join(names),
    }  # fmt: skip
    own = {"UNISONO_HOST_ID": f"host{rank % hosts}", "UNISONO_INTERFACE": "=lo"}
    return {**os.environ, **own, **{name: str(value) for name, value in set_by_srun.items()}}


@pytest.mark.parametrize("hosts", [1, 2])
def test_steps_of_a_slurm_job_stay_apart(program: Path, hosts: int) -> None:
    jobs = [
        [
            subprocess.Popen(
                [sys.executable, str(program)], env=by_slurm(rank, size, step, hosts),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(size)
        ]
        for step, size in enumerate((2, 3))
    ]  # fmt: skip
    said = [[line for rank in job for line in lines_of(rank)] for job in jobs]
    assert said == [all_ranks(2), all_ranks(3)]


def test_pods_that_run_the_program_without_torchrun(program: Path) -> None:
    """An operator of Kubernetes sets torch's variables, without the number of a host's ranks."""
    pytest.importorskip("torch")
    port = str(free_port())
    ranks = []
    for rank in range(2):
        named = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
        # an address that does not say that all ranks are on one host
        own = {"MASTER_ADDR": "::ffff:127.0.0.1", "UNISONO_HOST_ID": f"pod{rank}"}
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(program)],
                env={**os.environ, **named, **own, "UNISONO_INTERFACE": "=lo"},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    assert [line for rank in ranks for line in lines_of(rank)] == all_ranks(2)
