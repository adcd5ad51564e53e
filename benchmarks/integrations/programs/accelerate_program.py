"""Accelerate trains the digits with DistributedDataParallel."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from digits_task import BATCH, STEPS, Record, digits, network
from torch import distributed as dist
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(digits(), batch_size=BATCH, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
record = Record()
while len(record.losses) < STEPS:
    for images, classes in loader:
        loss = torch.nn.functional.cross_entropy(model(images), classes)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        record.step(loss.item())
        if len(record.losses) == STEPS:
            break
gathered = accelerator.gather_for_metrics(torch.tensor([accelerator.process_index]))
assert gathered.tolist() == list(range(accelerator.num_processes))
record.report()
dist.destroy_process_group()
