"""ignite trains the digits; `idist` makes the group, the sampler and DistributedDataParallel."""

from __future__ import annotations

import ignite.distributed as idist
import torch
from digits_task import BATCH, STEPS, Record, digits, network
from ignite.engine import Engine, Events
from ignite.metrics import RunningAverage

with idist.Parallel(backend="gloo") as parallel:
    model = idist.auto_model(network())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = idist.auto_dataloader(
        digits(), batch_size=BATCH * idist.get_world_size(), shuffle=True
    )
    record = Record()

    def step(engine, batch):
        """Trains on one batch and returns the loss."""
        images, classes = batch
        loss = torch.nn.functional.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record.step(loss.item())
        return loss.item()

    torch.manual_seed(0)
    trainer = Engine(step)
    RunningAverage(output_transform=float).attach(trainer, "mean")
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=STEPS), trainer.terminate)
    trainer.run(loader, max_epochs=10)
    ranks = idist.all_gather(torch.tensor([idist.get_rank()])).tolist()
    assert ranks == list(range(idist.get_world_size()))
    record.report()
