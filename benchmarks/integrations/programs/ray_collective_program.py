"""Actors of Ray train the digits; `ray.util.collective` adds their gradients.

A variable names the backend: gloo, or unisono, which Ray gets from its registry.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time

import ray
import torch
from digits_task import BATCH, STEPS, digits, network
from ray.util import collective
from torch import distributed as dist

RANKS = int(sys.argv[1])
BACKEND = os.environ.get("COLLECTIVE_BACKEND", "gloo")
if BACKEND == "unisono":
    from unisono.integrations.ray_collective import register
else:

    def register() -> None:
        """Does nothing: Ray knows its own backends."""


@ray.remote(num_cpus=1)
class Worker:
    """One rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def train(self) -> tuple[list[float], list[float], str]:
        """Returns the losses and the step times of this rank, and the library of its group."""
        torch.manual_seed(self.rank)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        images, classes = digits().tensors
        losses, times = [], []
        for _ in range(STEPS):
            begin = time.perf_counter()
            chosen = torch.randint(len(images), (BATCH,))
            loss = torch.nn.functional.cross_entropy(model(images[chosen]), classes[chosen])
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                collective.allreduce(parameter.grad)
                parameter.grad /= RANKS
            optimizer.step()
            losses.append(loss.item())
            times.append(time.perf_counter() - begin)
        group = collective.collective.get_group_handle()
        group = dist.group.WORLD if dist.is_initialized() else group
        served_by = type(group).__module__.split(".")[0]
        collective.barrier()
        collective.destroy_collective_group()
        return losses, times, served_by


ray.init(
    num_cpus=RANKS, include_dashboard=False, logging_level=logging.WARNING,
    runtime_env={
        "env_vars": {"PYTHONPATH": os.path.dirname(__file__)},
        "worker_process_setup_hook": register,
    },
)  # fmt: skip
register()
workers = [Worker.remote(rank) for rank in range(RANKS)]
collective.create_collective_group(workers, RANKS, list(range(RANKS)), backend=BACKEND)
found = ray.get([worker.train.remote() for worker in workers])
means = [sum(each) / RANKS for each in zip(*(losses for losses, _, _ in found), strict=True)]
ray.shutdown()
print("RESULT " + json.dumps({"served_by": found[0][2], "losses": means, "step_s": found[0][1]}))
