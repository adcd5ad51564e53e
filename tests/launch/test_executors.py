"""`unisono.run(executor=...)` starts ranks through executors, and ends them after failures."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import unisono
from unisono.bootstrap import LinkListener, dial_link
from unisono.errors import PeerLostError, RendezvousError
from unisono.transport import listen


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as found:
        yield found


def _total() -> tuple[int, list[float]]:
    with unisono.init() as comm:
        return comm.rank, comm.all_reduce(np.full(3, comm.rank + 1.0)).tolist()


def _variables() -> dict[str, str]:
    unisono.init().close()
    return {**os.environ, "pid": str(os.getpid()), "parent": str(os.getppid())}


def _gradients() -> list[float]:
    import torch
    from torch import distributed as dist

    dist.init_process_group("unisono")
    found = torch.full((2,), float(dist.get_rank()))
    dist.all_reduce(found)
    dist.destroy_process_group()
    return found.tolist()


def _one_raises() -> None:
    with unisono.init() as comm:
        comm.barrier()
        if comm.rank == 1:
            raise KeyError("the cause")
        comm.all_reduce(np.ones(3))


def _one_is_killed() -> None:
    with unisono.init() as comm:
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()


def _worker_is_killed() -> None:
    with unisono.init() as comm:
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(100)


def _ranks_of_this_process() -> list[int]:
    """Returns the pids of the ranks whose workers are this process or its children."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "rank_process" in " ".join(each.cmdline()):
                found.append(each.pid)
    return found


def test_results_are_in_rank_order(pool: ThreadPoolExecutor) -> None:
    assert unisono.run(_total, 3, executor=pool) == [(rank, [6.0] * 3) for rank in range(3)]


def test_workers_may_be_processes() -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as workers:
        assert unisono.run(_total, 2, executor=workers) == [(rank, [3.0] * 3) for rank in range(2)]


def test_ranks_have_the_variables_of_a_launcher(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_STREAMS", "2")
    monkeypatch.setenv("UNISONO_RANK", "7")
    found = unisono.run(_variables, 2, executor=pool)
    assert [each["UNISONO_RANK"] for each in found] == ["0", "1"]
    assert [(each["LOCAL_RANK"], each["LOCAL_WORLD_SIZE"]) for each in found] == [
        ("0", "2"), ("1", "2"),
    ]  # fmt: skip
    assert found[0]["UNISONO_STREAMS"] == "2"
    assert len({each["pid"] for each in found}) == 2
    assert {each["parent"] for each in found} == {str(os.getpid())}
    assert "UNISONO_JOB_SECRET" not in os.environ


@pytest.mark.torch
def test_torch_joins_its_group(pool: ThreadPoolExecutor) -> None:
    assert unisono.run(_gradients, 2, executor=pool) == [[1.0, 1.0]] * 2


def test_the_first_failure_is_raised_and_all_ranks_end(pool: ThreadPoolExecutor) -> None:
    with pytest.raises(KeyError, match="the cause") as caught:
        unisono.run(_one_raises, 3, executor=pool)
    assert "rank 1:" in caught.value.__notes__[0]
    pool.shutdown()
    assert not _ranks_of_this_process()


def test_a_killed_rank_is_named(pool: ThreadPoolExecutor) -> None:
    with pytest.raises(PeerLostError, match="rank 1 "):
        unisono.run(_one_is_killed, 3, executor=pool)


def test_a_killed_worker_is_named_and_all_ranks_end() -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as workers:
        with pytest.raises(PeerLostError, match=r"rank \d: its worker was lost"):
            unisono.run(_worker_is_killed, 2, executor=workers)
        _until(lambda: not _ranks_of_this_process())


def test_too_few_workers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TIMEOUT_S", "2")
    with (
        ThreadPoolExecutor(1) as one,
        pytest.raises(RendezvousError, match=r"has started 1 of 2 ranks.*give it 2 workers"),
    ):
        unisono.run(_total, 2, executor=one)


class _Refusing:
    """An executor whose workers cannot run the calls."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(ModuleNotFoundError("No module named 'unisono'"))
        return future


def test_a_worker_without_unisono_is_reported_at_once() -> None:
    with pytest.raises(RendezvousError, match=r"rank 0: .*ModuleNotFoundError: .*'unisono'"):
        unisono.run(_total, 2, executor=_Refusing())


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match=r"a method submit\(fn, \*args\).*not int"):
        unisono.run(_total, 2, executor=3)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as one, pytest.raises(ValueError, match="expected 1 to"):
        unisono.run(_total, 0, executor=one)


EXAMPLE = Path(__file__).parents[2] / "examples" / "on_a_cluster.py"


@pytest.mark.parametrize(
    ("kind", "module", "before"),
    [
        ("dask", "distributed", [sys.executable]),
        ("ray", "ray", [sys.executable]),
        ("mpi", "mpi4py", ["mpiexec", "-n", "5", sys.executable, "-m", "mpi4py.futures"]),
    ],
)
def test_the_example_runs_on_real_executors(kind: str, module: str, before: list[str]) -> None:
    pytest.importorskip(module)
    where = Path(sys.executable).parent
    if before[0] == "mpiexec" and not (where / "mpiexec").exists():
        pytest.skip("no mpiexec beside this Python: pip install mpich")
    environment = {**os.environ, "PATH": f"{where}:{os.environ['PATH']}"}
    words = [*before, str(EXAMPLE), kind]
    said = subprocess.run(
        words, check=False, capture_output=True, text=True, env=environment, timeout=110
    )
    assert said.returncode == 0, said.stderr
    assert str([(rank, 1.5, [4]) for rank in range(4)]) in said.stdout


PROGRAM = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import unisono

def stays(folder):
    with unisono.init() as comm:
        comm.barrier()
        Path(folder, f"{comm.rank}").write_text(str(os.getpid()))
        time.sleep(100)

if __name__ == "__main__":
    with ThreadPoolExecutor(2) as pool:
        unisono.run(stays, 2, (sys.argv[1],), executor=pool)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_the_program(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    program = subprocess.Popen([sys.executable, tmp_path / "program.py", tmp_path])
    files = [tmp_path / "0", tmp_path / "1"]
    _until(lambda: all(file.exists() and file.read_text() for file in files))
    program.send_signal(how)
    program.wait(60)
    _until(lambda: not any(psutil.pid_exists(int(file.read_text())) for file in files))


def _until(holds: Callable[[], bool]) -> None:
    """Waits until the condition holds. pytest-timeout ends a test that waits for ever."""
    while not holds():
        time.sleep(0.02)


def test_strangers_are_rejected_and_delay_nobody() -> None:
    arrived: list[Connection] = []
    known = threading.Event()

    def welcome(connection: Connection) -> None:
        arrived.append(connection)
        known.set()

    listener = LinkListener(listen(["127.0.0.1"], None), b"right", welcome)
    addresses = listener.addresses
    with contextlib.closing(listener), socket.create_connection(addresses[0]):
        with pytest.raises(RendezvousError, match="cannot reach the program"):
            dial_link(addresses, b"wrong", other_end="the program")
        with dial_link(addresses, b"right", other_end="the program") as connection:
            assert known.wait(30)
            arrived[0].send("hello")
            assert connection.recv() == "hello"
    assert len(arrived) == 1
    with pytest.raises(RendezvousError, match="cannot reach the program"):
        dial_link(addresses, b"right", other_end="the program")
