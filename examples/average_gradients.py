"""Data-parallel training without DistributedDataParallel, on the `unisono` backend.

Covers: `init_process_group("unisono")`, an all_reduce per parameter, `mp.spawn`, `torchrun`.
Scenario: four ranks learn handwritten digits. Each rank trains on a quarter of the images.

    python examples/average_gradients.py [gloo]     # starts four ranks
    torchrun --standalone --nproc-per-node 4 examples/average_gradients.py
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

RANKS = 4
EPOCHS, GLOBAL_BATCH = 8, 64


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def partition(rank, size):
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target)
    count = (
        len(labels) // size * size
    )  # equal shares: a rank with more batches would wait for ranks that have finished
    return images[rank:count:size], labels[rank:count:size]


def run():
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(1234)  # all ranks begin with the same model
    images, labels = partition(rank, size)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        losses = []
        for batch in torch.randperm(len(labels)).split(GLOBAL_BATCH // size):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            average_gradients(model)
            optimizer.step()
            losses.append(loss.item())
        right = (model(images).argmax(dim=1) == labels).float().mean()
        dist.all_reduce(right)
        if rank == 0:
            mean_loss, accuracy = sum(losses) / len(losses), right.item() / size
            print(f"epoch {epoch + 1}: loss {mean_loss:.4f}, training accuracy {accuracy:.1%}")
    dist.destroy_process_group()


def spawned(rank, backend, file):
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=RANKS)
    run()


if __name__ == "__main__":
    backend = sys.argv[1] if len(sys.argv) > 1 else "unisono"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
        run()
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(spawned, args=(backend, f"{folder}/rendezvous"), nprocs=RANKS)
