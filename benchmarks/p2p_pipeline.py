"""Measures steps of a 1F1B pipeline by torch.distributed.pipelining, on our backend and on Gloo.

As a program under torchrun, this file is the rank of one stage. It has a group for each backend,
and the backends alternate. Gradients are compared with those of the whole model without a pipeline.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

STAGES = 4
BACKENDS = ("unisono", "gloo")
END_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model of equal stages, and the size of the input of a step."""

    width: int
    microbatches: int
    rows: int
    """Number of rows in a microbatch."""

    @property
    def message_bytes(self) -> int:
        return self.rows * self.width * 4

    def stage(self, index: int) -> torch.nn.Module:
        """Returns a stage, which has the same weights in each call."""
        torch.manual_seed(index)
        return torch.nn.Sequential(torch.nn.Linear(self.width, self.width), torch.nn.Tanh())

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the inputs and targets of a step."""
        torch.manual_seed(1000)
        rows = self.rows * self.microbatches
        return torch.randn(rows, self.width), torch.randn(rows, self.width)


SHAPES = (
    Shape(width=64, microbatches=8, rows=4),
    Shape(width=256, microbatches=8, rows=64),
    Shape(width=512, microbatches=8, rows=512),
)


def measure(*, rounds: int, round_s: float) -> dict[str, Any]:
    """Measures all shapes. Raises RuntimeError with the ranks' last output if a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        words = ["env", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", sys.executable, "-m"]
        words += ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        words += ["--nproc-per-node", str(STAGES), "--log-dir", folder]
        words += [__file__, str(path), str(rounds), str(round_s)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=END_S, check=False)
        if done.returncode:
            raise RuntimeError(f"the pipeline failed:\n{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(path.read_text())
    return found


# ---- code that runs on each rank


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, target)


def _bind(shape: Shape, group: dist.ProcessGroup) -> tuple[torch.nn.Module, Callable[[], object]]:
    """Returns this rank's stage, and a function that runs a step of the pipeline and accumulates
    gradients.
    """
    rank = dist.get_rank()
    module = shape.stage(rank)
    stage = PipelineStage(module, rank, STAGES, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, shape.microbatches, loss_fn=_loss)
    inputs, targets = shape.batch()
    if rank == 0:
        return module, lambda: schedule.step(inputs)
    if rank == STAGES - 1:
        return module, lambda: schedule.step(target=targets)
    return module, schedule.step


def _wanted(shape: Shape) -> list[torch.Tensor]:
    """Returns the gradients of this rank's stage, computed in the whole model."""
    stages = [shape.stage(index) for index in range(STAGES)]
    whole = torch.nn.Sequential(*stages)
    parts = [whole_batch.chunk(shape.microbatches) for whole_batch in shape.batch()]
    for inputs, targets in zip(*parts, strict=True):
        (_loss(whole(inputs), targets) / shape.microbatches).backward()
    return [_gradient(parameter) for parameter in stages[dist.get_rank()].parameters()]


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _step_s(step: Callable[[], object], module: torch.nn.Module, steps: int) -> float:
    """Returns the seconds per step of the slowest rank."""
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(steps):
        module.zero_grad(set_to_none=True)
        step()
    took = torch.tensor([(time.perf_counter() - start_s) / steps])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _row(
    shape: Shape, groups: dict[str, dist.ProcessGroup], rounds: int, round_s: float
) -> dict[str, Any]:
    bound = {name: _bind(shape, group) for name, group in groups.items()}
    wrong, often = 0, {}
    for name, (module, step) in bound.items():
        step()
        pairs = zip(module.parameters(), _wanted(shape), strict=True)
        wrong += sum(not torch.allclose(_gradient(p), w, atol=1e-5) for p, w in pairs)
        call_s = _step_s(step, module, 3)
        often[name] = max(3, int(round_s / call_s))
    times_s: dict[str, list[float]] = {name: [] for name in bound}
    for round_ in range(rounds):
        for name in BACKENDS if round_ % 2 else BACKENDS[::-1]:
            module, step = bound[name]
            times_s[name].append(_step_s(step, module, often[name]))
    count = torch.tensor([wrong])
    dist.all_reduce(count)
    medians = {name: median(times) for name, times in times_s.items()}
    return {
        **asdict(shape),
        "message_bytes": shape.message_bytes,
        "wrong": int(count),
        "times_s": times_s,
        "time_s": medians,
    }


def main() -> None:
    path, rounds, round_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    rows = [_row(shape, groups, rounds, round_s) for shape in SHAPES]
    if dist.get_rank() == 0:
        path.write_text(json.dumps({"stages": STAGES, "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
