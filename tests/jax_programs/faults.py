"""What a JAX program sees after a fault. Prints one line of each rank that raised.

python faults.py killed | aborted | stopped | raised | exited | other_call | several_devices | some
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np

import unisono

RANKS = 3


def say(text: str) -> None:
    """Prints a line at once, whole also beside those of other ranks."""
    os.write(1, f"{text}\n".encode())


def body(kind: str) -> None:
    import unisono.jax  # isort: skip # before jax

    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    if kind == "several_devices":
        jax.config.update("jax_num_cpu_devices", 2)
    unisono.jax.initialize(heartbeat_timeout_seconds=10)
    devices = jax.devices()[: 2 if kind == "some" else None]
    if kind == "some" and jax.process_index() == 2:
        time.sleep(8)
        os._exit(0)
    mesh = jax.make_mesh((len(devices),), ("ranks",), devices=devices)
    split, whole = PartitionSpec("ranks"), PartitionSpec()

    def summed(count: int) -> Any:
        x = np.ones((len(devices), count), np.float32)
        placed = jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, split), lambda index: x[index]
        )
        total = jax.shard_map(
            lambda x: jax.lax.psum(x, "ranks"), mesh=mesh, in_specs=split, out_specs=whole
        )
        return jax.block_until_ready(jax.jit(total)(placed))

    rank = jax.process_index()
    if kind not in ("several_devices", "some"):
        summed(1)
    if kind in ("killed", "aborted") and rank == 1:
        time.sleep(1)  # the others wait for this rank
        say(f"rank 1 dies at {time.monotonic()}")
        os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGABRT)
    if kind == "raised" and rank == 1:
        raise RuntimeError("a fault of the program")
    if kind == "exited" and rank == 1:
        sys.exit(3)
    if kind == "stopped" and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        summed(7 + (kind == "other_call" and rank == 1))
    except Exception as error:
        said = " ".join(str(error).split())
        say(f"rank {rank} raised {type(error).__name__}: {said} at {time.monotonic()}")
    time.sleep(2)  # the end of one rank ends the others
    os._exit(0)  # without the coordinator's wait for ranks that have failed


if __name__ == "__main__":
    if "RANK" in os.environ:
        body(sys.argv[1])
    else:
        unisono.run(body, ranks=RANKS, args=(sys.argv[1],))
