"""Trains handwritten digits with Hugging Face's Accelerate over Unisono.

Needs: accelerate
Covers: `UNISONO_REPLACE=gloo` as a call in the program; Accelerate itself asks torch for gloo.
Scenario: each rank trains on its part of each batch. All ranks end with the same accuracy.

    torchrun --nproc-per-node 2 examples/accelerate_digits.py

Without the lines that name unisono, the same program is started with the variable:

    UNISONO_REPLACE=gloo torchrun --nproc-per-node 2 program.py
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from unisono.torch_backend import communicator_of, stand_in_for

stand_in_for("gloo")


def main() -> None:
    accelerator = Accelerator(cpu=True)
    images, classes = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(classes))
    torch.manual_seed(0)
    training, test = torch.utils.data.random_split(data, [1500, len(data) - 1500])
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, DataLoader(training, 32, shuffle=True), DataLoader(test, 64)
    )
    for _ in range(4):
        for inputs, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    right = []
    for inputs, targets in test_loader:
        right.append(accelerator.gather_for_metrics(model(inputs).argmax(1) == targets))
    accuracy = torch.cat(right).float().mean().item()
    accelerator.print(f"accuracy {accuracy:.3f} on {accelerator.num_processes} ranks")
    assert len(torch.cat(right)) == len(test) and accuracy > 0.85
    assert communicator_of(dist.group.WORLD) is not None, "another backend served the ranks"
    accelerator.end_training()


if __name__ == "__main__":
    main()
