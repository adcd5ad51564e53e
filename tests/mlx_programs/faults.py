"""What an MLX program sees after a fault.

UNISONO_RANK=0 ... python faults.py KIND, and so on for each rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import unisono.mlx  # noqa: F401 # isort: skip # before MLX

import mlx.core as mx


def main(kind: str) -> None:
    group = mx.distributed.init(strict=True)
    rank, is_culprit = group.rank(), group.rank() == 1
    mx.eval(mx.distributed.all_sum(mx.ones(1)))
    print(f"rank {rank} began")  # in Python's buffer when the process ends
    if kind == "killed" and is_culprit:
        time.sleep(1)  # the others wait for this rank
        os.write(1, f"killed at {time.monotonic()}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stopped" and is_culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "raised" and is_culprit:
        raise RuntimeError("a fault of the program")
    if kind == "raised_with_pending" and is_culprit:
        mx.async_eval(mx.distributed.all_sum(mx.ones(7)))
        raise RuntimeError("a fault of the program")
    if kind == "exited" and is_culprit:
        sys.exit(3)
    if kind == "late" and is_culprit:
        time.sleep(30)
    if kind == "other_message":
        if is_culprit:
            mx.eval(mx.distributed.send(mx.ones(4), 0))
        elif rank == 0:
            mx.eval(mx.distributed.recv((5,), mx.float32, 1))
    if kind == "split":
        group.split(-1)
    if kind == "other_call" and is_culprit:
        mx.eval(mx.distributed.all_gather(mx.ones(7)))
    total = mx.distributed.all_sum(mx.ones(7 + (kind == "other_count" and is_culprit)))
    print("the result is", total.tolist())
    os._exit(9)  # not reached


if __name__ == "__main__":
    main(sys.argv[1])
