"""`unisono.run` returns results by rank, reports the first failure, and leaves no processes or
files.

The programs are scripts like a user's: `run` starts interpreters that import the program.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import unisono
from unisono import config, native
from unisono.errors import UnisonoError

PROGRAM = """
import json, multiprocessing, os, signal, sys, time
import numpy as np
import unisono

class Odd(Exception):
    def __init__(self, one, two):
        super().__init__("odd one")

def ranks():
    comm = unisono.init()
    return comm.rank, comm.size, comm.all_reduce(np.full(2, comm.rank + 1.0)).tolist()

def arguments(a, b):
    return [a, b, os.environ["UNISONO_RANK"]]

def large():
    return np.ones(500_000).sum(), bytes(3_000_000)

def one_raises():
    comm = unisono.init()
    comm.barrier()
    if comm.rank == 1:
        raise KeyError("the cause")
    comm.all_reduce(np.ones(3))

def odd_error():
    raise Odd(1, 2)

def local_error():
    class Local(Exception):
        pass
    raise Local("from within")

def unpicklable_result():
    return multiprocessing.Lock()

def killed():
    comm = unisono.init()
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()

def exits():
    comm = unisono.init()
    if comm.rank == 2:
        os._exit(7)
    comm.barrier()

def one_hangs():
    if os.environ["UNISONO_RANK"] == "0":
        raise ValueError("one failed")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(100)

def nested():
    return unisono.run(arguments, ranks=2, args=(1, [2])) if unisono.init().rank == 0 else None

def outcome(function, size, args=()):
    started = time.monotonic()
    try:
        said = {"result": repr(unisono.run(function, size, args))[:2000]}
    except BaseException as error:
        said = {"error": type(error).__name__, "text": str(error),
                "notes": "\\n".join(getattr(error, "__notes__", []))}
    said["children"] = len(multiprocessing.active_children())
    said["seconds"] = time.monotonic() - started
    return said

if __name__ == "__main__":
    cases = [(ranks, 3), (large, 2), (one_raises, 3), (odd_error, 1),
             (local_error, 1), (unpicklable_result, 1), (killed, 3),
             (exits, 3), (one_hangs, 2), (nested, 2), (ranks, 0)]
    slow = (one_raises, killed, one_hangs)  # mostly waiting
    for case in [case for case in cases if (case[0] in slow) is (sys.argv[1] == "slow")]:
        print(json.dumps([case[0].__name__, case[1], outcome(*case)]), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("launch")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "TMPDIR": str(folder)}
    programs = [
        subprocess.Popen(
            [sys.executable, program, cases],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for cases in ("slow", "quick")
    ]
    lines = []
    for started in programs:
        output, errors = started.communicate(timeout=110)
        assert started.returncode == 0, errors
        lines += [json.loads(line) for line in output.splitlines()]
    left = {path.name for path in folder.iterdir()} - {"program.py", "__pycache__"}
    found = {(name, size): said for name, size, said in lines}
    return found | {("left", 0): {"left": sorted(left)}}


Outcomes = dict[tuple[str, int], dict[str, Any]]


def test_results_are_in_rank_order(outcomes: Outcomes) -> None:
    expected = [(rank, 3, [6.0, 6.0]) for rank in range(3)]
    assert outcomes["ranks", 3]["result"] == repr(expected)
    assert "500000.0" in outcomes["large", 2]["result"]
    assert outcomes["nested", 2]["result"] == repr([[[1, [2], "0"], [1, [2], "1"]], None])


def test_the_first_failure_is_raised_with_its_traceback(outcomes: Outcomes) -> None:
    said = outcomes["one_raises", 3]
    assert (said["error"], said["text"]) == ("KeyError", "'the cause'")
    assert "rank 1:" in said["notes"]
    assert "in one_raises" in said["notes"]


def test_errors_that_cannot_be_pickled_keep_their_text(outcomes: Outcomes) -> None:
    said = outcomes["odd_error", 1]
    assert (said["error"], said["text"]) == ("UnisonoError", "Odd: odd one")
    assert "in odd_error" in said["notes"]
    said = outcomes["local_error", 1]
    assert (said["error"], said["text"]) == ("Local", "from within")
    said = outcomes["unpicklable_result", 1]
    assert "should only be shared between processes through inheritance" in said["text"]


def test_a_rank_that_ends_without_a_result_is_named(outcomes: Outcomes) -> None:
    said = outcomes["killed", 3]
    assert said["error"] == "PeerLostError"
    assert "rank 1 (pid " in said["text"]
    said = outcomes["exits", 3]
    assert said["error"] == "PeerLostError"
    assert "rank 2" in said["text"]
    assert outcomes["ranks", 0] | {"seconds": 0} == {
        "error": "ValueError", "text": "ranks: expected 1 to 4096 on one host, not 0", "notes": "",
        "children": 0, "seconds": 0,
    }  # fmt: skip


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks: expected 1 to 4096 on one host, not 4097"):
        unisono.run(max, config.MOST_RANKS + 1, args=(3, 5))
    native.segment_shape(config.MOST_RANKS, 2, 1 << 20)
    with pytest.raises(UnisonoError, match="a group has 1 to 4096 ranks"):
        native.segment_shape(config.MOST_RANKS + 1, 2, 1 << 20)


def test_a_program_without_a_main_guard_gets_an_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import unisono\nprint(unisono.run(max, ranks=2, args=(3, 5)))\n")
    command = [sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode != 0 and not done.stdout
    assert "PeerLostError: rank" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr


def test_a_rank_that_hangs_is_ended(outcomes: Outcomes) -> None:
    said = outcomes["one_hangs", 2]
    assert (said["error"], said["text"]) == ("ValueError", "one failed")
    print(f"ended after {said['seconds']:.1f} s")
    assert said["seconds"] < 20


def test_no_process_or_file_remains(outcomes: Outcomes) -> None:
    assert outcomes.pop(("left", 0))["left"] == []
    assert {said["children"] for said in outcomes.values()} == {0}


# ---- the program that called `run` is killed

KILLED_PROGRAM = """
import os, signal, sys, time
import numpy as np
import unisono

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run under nohup

if __name__ != "__main__" and sys.argv[2] == "early":  # a rank that has not quite begun
    open(f"{sys.argv[1]}/x-{os.getpid()}", "w").close()
    time.sleep(1.0)

def work(folder):
    comm = unisono.init()
    comm.barrier()
    if sys.argv[2] == "late":
        open(f"{folder}/{comm.rank}-{os.getpid()}", "w").close()
    if comm.rank == 0:
        time.sleep(100)
    elif comm.rank == 1:
        comm.all_reduce(np.ones(3))
    else:
        comm.recv(np.ones(3))

if __name__ == "__main__":
    unisono.run(work, ranks=3, args=(sys.argv[1],))
"""


@pytest.mark.parametrize(
    ("number", "when"),
    [(signal.SIGKILL, "late"), (signal.SIGKILL, "early"), (signal.SIGINT, "late")],
)
def test_no_rank_remains_after_the_program_is_killed(
    number: int, when: str, tmp_path: Path
) -> None:
    program, marks, temporary = (tmp_path / name for name in ("program.py", "marks", "tmp"))
    program.write_text(KILLED_PROGRAM)
    marks.mkdir()
    temporary.mkdir()
    before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, program, marks, when],
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 40
        while len(list(marks.iterdir())) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        pids = [int(path.name.split("-")[1]) for path in marks.iterdir()]
        time.sleep(0.2)
        process.send_signal(number)
        ended = time.monotonic()
        process.wait(30)
    finally:
        process.kill()
        process.wait()
    while any(_lives(pid) for pid in pids) and time.monotonic() - ended < 10:
        time.sleep(0.01)
    print(f"all ranks had ended after {time.monotonic() - ended:.3f} s")
    assert not any(_lives(pid) for pid in pids)
    assert list(temporary.iterdir()) == []
    new = set(os.listdir("/dev/shm")) - before
    assert not [name for name in new if "unisono" in name or str(process.pid) in name]


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
