"""DeepSpeed trains the digits with ZeRO-3 on CPUs: parameters, gradients and state in shards."""

from __future__ import annotations

import os

# DeepSpeed's own shared memory needs the variable, which torchrun does not set; without it, the
# first call of inference_all_reduce ends the process.
os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])

import deepspeed
import torch
from digits_task import BATCH, STEPS, Record, digits, network
from torch import distributed as dist

record = Record()
model, _, loader, _ = deepspeed.initialize(
    model=network(),
    training_data=digits(),
    config={
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 10.0,
        "steps_per_print": STEPS + 1,
    },
)
while len(record.losses) < STEPS:
    for images, classes in loader:
        loss = torch.nn.functional.cross_entropy(model(images), classes)
        model.backward(loss)
        model.step()
        record.step(loss.item())
        if len(record.losses) == STEPS:
            break
ranks = dist.get_world_size()
total = torch.arange(1000.0) + dist.get_rank()
deepspeed.comm.inference_all_reduce(total)  # through DeepSpeed's shared memory
assert torch.equal(total, ranks * torch.arange(1000.0) + ranks * (ranks - 1) / 2)
record.report()
dist.destroy_process_group()
