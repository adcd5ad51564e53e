"""JAX between processes, on the installed jaxlib."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bootstrap_stores import free_port
from time_limits import limit_s
from unisono import native

jaxlib = pytest.importorskip("jaxlib")

pytestmark = [pytest.mark.optional]
HERE = Path(__file__).parent
FAULT = re.compile(r"rank (\d) raised JaxRuntimeError: UNKNOWN: MPI error: (.*) at ([\d.]+)")


def run(*command: str, fails: bool = False, **environment: str) -> str:
    """Runs Python with these arguments; returns the output."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", **environment},
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_library_has_every_name_that_jax_looks_up():
    ours = ctypes.CDLL(str(Path(native.library_folder(), "libunisono_mpi.so")))
    theirs = Path(jaxlib.__file__).with_name("libjax_common.so").read_bytes()
    names = set(re.findall(rb"\0(MPIX?ABI_\w+|mpiwrapper_\w+|mpiabi_version_\w+)(?=\0)", theirs))
    assert len(names) > 600
    missing = [name.decode() for name in names if not hasattr(ours, name.decode())]
    assert not missing


def test_the_example_equals_one_process():
    assert "those of one process" in run(str(HERE.parents[1] / "examples" / "jax_mesh.py"))


def test_the_coordinator_of_several_hosts_has_the_address_that_other_connections_use():
    program = (
        "from unisono.jax import coordinator\nprint(coordinator._coordinator(several_hosts=True))"
    )
    said = run("-c", program, UNISONO_INTERFACE="=lo", UNISONO_SOCKET_FAMILY="AF_INET")
    assert re.fullmatch(r"127\.0\.0\.1:\d+", said.strip())


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives(ranks: int):
    run("collectives.py", str(ranks))


def test_collectives_between_hosts_with_tls():
    secret = "a secret of the job"
    run("collectives.py", "4", "2", UNISONO_TLS="psk", UNISONO_JOB_SECRET=secret)


def test_a_mesh_that_others_do_not_use_fails_after_the_timeout():
    found = FAULT.findall(run("faults.py", "some", fails=True, UNISONO_TIMEOUT_S="5"))
    assert {rank for rank, _, _ in found} == {"0", "1"}
    assert all("rank 2" in text for _, text, _ in found)


def test_a_stopped_process_is_named_after_the_timeout():
    found = FAULT.findall(run("faults.py", "stopped", fails=True, UNISONO_TIMEOUT_S="4"))
    assert {rank for rank, _, _ in found} == {"0", "2"}
    assert all("rank 1 has not arrived" in text for _, text, _ in found)


@pytest.mark.parametrize("kind", ["raised", "exited"])
def test_a_process_that_leaves_is_named(kind: str):
    found = FAULT.findall(run("faults.py", kind, fails=True))
    assert {rank for rank, _, _ in found} == {"0", "2"}
    assert all(text.startswith("rank 1 ") for _, text, _ in found)


@pytest.mark.parametrize("kind", ["killed", "aborted"])
def test_a_process_that_dies_is_named_within_a_second(kind: str):
    said = run("faults.py", kind, fails=True)
    died = re.search(r"rank 1 dies at ([\d.]+)", said)
    assert died, said
    found = FAULT.findall(said)
    assert {rank for rank, _, _ in found} == {"0", "2"}, said
    for _, text, at in found:
        assert re.fullmatch(r"rank 1 \(pid \d+\) is gone", text)
        assert float(at) - float(died[1]) < limit_s(3.0)


def test_another_call_is_told_with_each_ranks_call():
    found = FAULT.findall(run("faults.py", "other_call", fails=True))
    assert len(found) == 3
    for _, text, _ in found:
        assert "rank 0 called all_reduce(sum, float32[7])" in text
        assert "rank 1 called all_reduce(sum, float32[8])" in text


def test_several_devices_of_a_process_are_refused():
    found = FAULT.findall(run("faults.py", "several_devices", fails=True))
    assert len(found) == 3
    for _, text, _ in found:
        assert text.startswith("expected one CPU device in each process, got 2")


def test_jax_imported_first_is_refused():
    said = run("-c", "import jax, unisono.jax", fails=True)
    assert "jax was imported before unisono.jax" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [("JAX_CPU_COLLECTIVES_IMPLEMENTATION", "gloo"), ("MPITRAMPOLINE_LIB", "/opt/mpi.so")],
)
def test_other_collectives_are_refused(name: str, value: str):
    said = run("-c", "import unisono.jax", fails=True, **{name: value})
    assert f"{name}={value} asks for other collectives" in said


def test_a_program_of_one_process_needs_no_group():
    program = "import unisono.jax, jax; print(jax.jit(lambda x: x + 1)(1.0), jax.device_count())"
    assert run("-c", program).split()[-2:] == ["2.0", "1"]


def test_programs_that_initialise_jax_themselves():
    program = (
        "import sys, unisono.jax, jax\n"
        "jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))\n"
        "from jax.experimental import multihost_utils\n"
        "total = multihost_utils.process_allgather(jax.numpy.arange(3) + jax.process_index())\n"
        "assert total.tolist() == [[0, 1, 2], [1, 2, 3]], total\n"
        "jax.distributed.shutdown()\n"
    )
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen([sys.executable, "-c", program, address, str(rank)], env=environment)
        for rank in range(2)
    ]
    try:
        assert [each.wait(100) for each in processes] == [0, 0]
    finally:
        for each in processes:
            each.kill()


def test_an_unserved_function_says_its_name():
    program = (
        "import ctypes, pathlib; from unisono import native\n"
        "ctypes.CDLL(str(pathlib.Path(native.library_folder(), 'libunisono_mpi.so')))"
        ".MPIABI_Win_create()"
    )
    assert "unisono: MPIABI_Win_create is not served" in run("-c", program, fails=True)
