"""torchft trains the digits in replicas of one process. One replica is killed and returns.

    python torchft_program.py RANKS    # a variable names the process group: gloo, or unisono

The losses are those of the steps before the kill. After it, the others go on with one rank less;
the new replica gets the weights from them, and all end with the same weights.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
from digits_task import BATCH, STEPS, digits, network
from torch import distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroupGloo

MORE = 60
"""The largest number of steps in which the killed replica has to be back."""


def process_group():
    """Returns the process group that the variable names."""
    timeout = timedelta(seconds=60)
    if os.environ.get("TORCHFT_GROUP") != "unisono":
        return ProcessGroupGloo(timeout=timeout)
    from unisono.integrations.torchft_group import ProcessGroupUnisono

    return ProcessGroupUnisono(timeout=timeout)


def managed(rank: int, lighthouse: str, model, optimizer) -> Manager:
    """Returns the manager of a replica, which also copies the state to a replica that returns."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return Manager(
        pg=process_group(), min_replica_size=1, use_async_quorum=False, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{rank}", store_addr="127.0.0.1", store_port=store.port, rank=0,
        world_size=1, lighthouse_addr=lighthouse, init_sync=False,
        timeout=timedelta(seconds=60), quorum_timeout=timedelta(seconds=60),
    )  # fmt: skip


def begin_together(rank: int, ranks: int, port: int) -> None:
    """Waits until all replicas have started, so that the first step is one of all."""
    ready = dist.TCPStore("127.0.0.1", port)
    ready.set(f"ready/{rank}", "1")
    ready.wait([f"ready/{each}" for each in range(ranks)], timedelta(seconds=100))


def replica(rank: int, ranks: int, lighthouse: str, port: int, *, returned: bool) -> None:
    """Trains in one replica and prints its record. `port` is that of the program's store."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = managed(rank, lighthouse, model, optimizer)
    begin_together(rank, ranks, port)
    trained, stepper = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    images, classes = digits().tensors
    losses, times, sizes, full = [], [], [], 0
    while full < 3:  # until all replicas have trained together again
        step = manager.current_step()
        if step >= STEPS + MORE:
            raise SystemExit(f"replica {rank}: the killed replica is not back: {sizes}")
        if step == STEPS and rank == ranks - 1 and not returned:
            print(json.dumps({"losses": losses, "step_s": times}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.perf_counter()
        stepper.zero_grad()
        step, size = manager.current_step(), manager.num_participants()
        chosen = torch.Generator().manual_seed(1000 * step + rank)
        chosen = torch.randint(len(images), (BATCH,), generator=chosen)
        loss = torch.nn.functional.cross_entropy(trained(images[chosen]), classes[chosen])
        loss.backward()
        stepper.step()
        if manager.current_step() == step:
            continue  # a replica has failed, so the step does not count
        times.append(time.perf_counter() - begin)
        sizes.append(size)
        losses.append(loss.item())
        if len(losses) > STEPS or returned:
            full = full + 1 if size == ranks and (returned or min(sizes) < ranks) else 0
            time.sleep(0.2)  # the new replica needs seconds to start
    weights = sum(parameter.double().sum().item() for parameter in model.parameters())
    group = manager._pg
    served_by = type(group.parent).__module__.split(".")[0]
    found = {"losses": losses[:STEPS], "step_s": times[:STEPS], "sizes": sizes}
    print(json.dumps({**found, "weights": weights, "served_by": served_by}), flush=True)
    manager.shutdown(wait=False)
    group.shutdown()


def start(rank: int, ranks: int, lighthouse: str, port: int, kind: str) -> subprocess.Popen[str]:
    """Starts a replica's process."""
    command = [sys.executable, __file__, str(ranks), str(rank), lighthouse, str(port), kind]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def main(ranks: int) -> None:
    """Runs the replicas under a lighthouse, restarts the killed one and prints the result."""
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10000, heartbeat_timeout_ms=2000
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = (ranks, server.address(), store.port)
    replicas = [start(rank, *where, "first") for rank in range(ranks)]
    killed = replicas[-1].communicate(timeout=200)[0]
    replicas[-1] = start(ranks - 1, *where, "returned")
    found = [json.loads(one.communicate(timeout=200)[0].splitlines()[-1]) for one in replicas]
    server.shutdown()
    assert len({one["weights"] for one in found}) == 1, [one["weights"] for one in found]
    assert {ranks - 1, ranks} <= set(found[0]["sizes"]), found[0]["sizes"]
    losses = [one["losses"] for one in (*found[:-1], json.loads(killed.splitlines()[-1]))]
    means = [sum(each) / ranks for each in zip(*losses, strict=True)]
    record = {"served_by": found[0]["served_by"], "losses": means, "step_s": found[0]["step_s"]}
    print("RESULT " + json.dumps(record), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(int(sys.argv[1]))
    else:
        replica(
            int(sys.argv[2]), int(sys.argv[1]), sys.argv[3], int(sys.argv[4]),
            returned=sys.argv[5] == "returned",
        )  # fmt: skip
