"""DistributedDataParallel on the `unisono` backend. Only the backend's name differs from Gloo.

Covers: `init_process_group("unisono")`, DistributedDataParallel, DistributedSampler, `torchrun`.
Scenario: four ranks learn handwritten digits. Rank 0 measures the accuracy on unseen images.

    torchrun --standalone --nproc-per-node 4 examples/ddp_digits.py
"""

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

HELD_OUT_EVERY = 5
EPOCHS = 10


def main():
    dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "unisono")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target)
    unseen = torch.arange(len(labels)) % HELD_OUT_EVERY == 0

    train_set = TensorDataset(images[~unseen], labels[~unseen])
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(
        nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch_images, batch_labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(batch_images), batch_labels).backward()
            optimizer.step()

    if dist.get_rank() == 0:
        guess = model.module(images[unseen]).argmax(dim=1)
        accuracy = (guess == labels[unseen]).float().mean().item()
        print(f"accuracy on {len(guess)} unseen images: {accuracy:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
