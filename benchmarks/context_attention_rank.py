"""A rank of `context_attention.py`: its calls, their times and their memory."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed as dist

from unisono.parallel.context import CONTEXT_KINDS, ContextAttention, zigzag_part
from unisono.parallel.context.attention_blocks import (
    AttentionGradient,
    MergedAttention,
    block_of_ring,
)
from unisono.parallel.context.gathered_attention import whole_attention
from unisono.parallel.context.ring_attention import RingExchange

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
WHOLE, EXCHANGE, ATTENTION = "one process", "exchange", "attention"
_MMAP_THRESHOLD = -3  # the parameter M_MMAP_THRESHOLD of mallopt


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Measurements of one sequence length on some ranks."""

    network: str
    ranks: int
    length: int
    seconds: dict[str, tuple[float, ...]]
    """Seconds of a call on the slowest rank, by contestant, with one entry per round."""
    peak_bytes: dict[str, int]
    """For each contestant, the bytes by which a call increases a rank's memory, not counting the
    call's inputs.
    """
    kept_bytes: dict[str, int]
    """For each contestant, the bytes by which forward increases a rank's memory (output and data
    for backward).
    """

    def median_s(self, name: str) -> float:
        """Returns the median time of a contestant in seconds."""
        return median(self.seconds[name])

    @property
    def hidden(self) -> float | None:
        """Fraction of the exchange's time during which the ring also computes attention, so that
        the exchange is hidden. Uses the fastest rounds.

        None if the exchange is too short to measure this: less than a tenth of the attention's
        time.
        """
        exchange_s, attention_s, ring_s = (
            min(self.seconds[name]) for name in (EXCHANGE, ATTENTION, "ring")
        )
        if exchange_s < attention_s / 10:
            return None
        return (exchange_s + attention_s - ring_s) / exchange_s


class Contestants:
    """Calls of all contestants for one sequence length. Each call is one forward and backward."""

    def __init__(self, length: int) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(0)
        self.whole = [
            # the layout of a model's projections: (batch, sequence, heads, head_dim)
            torch.randn(1, length, heads, HEAD_DIM, generator=generator).transpose(1, 2)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        self.part = zigzag_part(length, self.rank, self.ranks)
        self.mine = [
            each.transpose(1, 2)[:, self.part].transpose(1, 2).requires_grad_()
            for each in self.whole
        ]
        group = dist.group.WORLD
        assert group is not None
        self.ring = RingExchange(group)
        self.attentions = {kind: ContextAttention(kind, group) for kind in CONTEXT_KINDS}
        self.calls: dict[str, Callable[[], object]] = {
            **{name: partial(self.attend, name) for name in (WHOLE, *CONTEXT_KINDS)},
            EXCHANGE: self.exchange_alone,
            ATTENTION: self.attend_alone,
        }

    def wrong(self) -> int:
        """Returns the number of kinds of context attention with wrong output, summed over all
        ranks.
        """
        with torch.no_grad():
            query, key, value = self.whole
            want = whole_attention(query, key, value, is_causal=True)[:, :, self.part]
            query, key, value = self.mine
            found = [attention(query, key, value) for attention in self.attentions.values()]
        return int(summed(sum(not torch.allclose(each, want, atol=1e-5) for each in found)))

    def forward(self, name: str) -> torch.Tensor | None:
        """Returns the output of a kind of context attention, or of attention in one process. In the
        second case, all ranks except rank 0 only wait, and get None.
        """
        if name == WHOLE:
            query, key, value = (each.requires_grad_() for each in self.whole)
            return whole_attention(query, key, value, is_causal=True) if self.rank == 0 else None
        query, key, value = self.mine
        return self.attentions[name](query, key, value)

    def attend(self, name: str) -> None:
        """Runs forward and backward of a kind of context attention, or of one-process attention."""
        out = self.forward(name)
        if out is not None:
            inputs = self.whole if name == WHOLE else self.mine
            torch.autograd.grad(out, inputs, torch.ones_like(out))

    def exchange_alone(self) -> None:
        """Sends only the ring's messages: keys and values twice (for forward and for backward), and
        their gradients once.
        """
        own = tuple(each.detach().transpose(1, 2) for each in self.mine[1:])
        for _ in self.ring.visit(own):
            pass
        sums, spare, arriving = own, None, None
        for _ in self.ring.visit(own):
            if arriving is not None:
                sums, spare = arriving.wait(), None if sums is own else sums
            arriving = self.ring.start(sums, spare)
        assert arriving is not None
        arriving.wait()

    @torch.no_grad()
    def attend_alone(self) -> None:
        """Computes the ring's blocks without messages, with this rank's keys and values instead of
        the other ranks'.
        """
        query, *own = (each.detach() for each in self.mine)
        keys = tuple(own)
        length = query.shape[2]
        blocks = [
            block_of_ring(self.rank, (self.rank - step) % self.ranks, length, is_causal=True)
            for step in range(self.ranks)
        ]
        merged = MergedAttention(query)
        for block in blocks:
            merged.add(keys, block)
        ones = torch.ones_like(query)
        gradient = AttentionGradient(ones, query, merged.out, merged.logsumexp)
        sums = [torch.zeros_like(each) for each in keys]
        for block in blocks:
            for total, each in zip(sums, gradient.add(keys, block), strict=True):
                total[:, :, block.keys] += each


def summed(value: float, op: Any = dist.ReduceOp.SUM) -> float:
    """Returns the sum, or another reduction, of the ranks' values."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total, op)
    return float(total)


def call_s(call: Callable[[], object]) -> float:
    """Returns the seconds of a call on the slowest rank."""
    dist.barrier()
    start_s = time.perf_counter()
    call()
    return summed(time.perf_counter() - start_s, dist.ReduceOp.MAX)


def memory_bytes(call: Callable[[], object], field: str = "VmHWM") -> int:
    """Returns the bytes by which a call increases the resident memory, the maximum over all ranks.

    This includes the call's result. `field` selects the peak (`VmHWM`) or the value at the end
    (`VmRSS`).
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak VmHWM
    before = _resident_bytes("VmRSS")
    result = call()
    growth = _resident_bytes(field) - before
    del result
    return int(summed(growth, dist.ReduceOp.MAX))


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise LookupError(f"/proc/self/status has no {field}")


def measure(network: str, length: int, most_rounds: int, length_s: float) -> Row:
    """Measures all contestants for one sequence length, until all rounds have run or `length_s`
    seconds have passed.
    """
    contestants = Contestants(length)
    if wrong := contestants.wrong():
        raise RuntimeError(f"{wrong} outputs of {length} positions differ from one process")
    names = list(contestants.calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    start_s = time.monotonic()
    for round_ in range(most_rounds):
        for place in range(len(names)):
            name = names[(place + round_) % len(names)]
            seconds[name].append(call_s(contestants.calls[name]))
        if summed(time.monotonic() - start_s, dist.ReduceOp.MAX) > length_s:
            break
    return Row(
        network=network,
        ranks=contestants.ranks,
        length=length,
        seconds={name: tuple(each) for name, each in seconds.items()},
        peak_bytes={
            name: memory_bytes(contestants.calls[name]) for name in (WHOLE, *CONTEXT_KINDS)
        },
        kept_bytes={
            name: memory_bytes(partial(contestants.forward, name), "VmRSS")
            for name in (WHOLE, *CONTEXT_KINDS)
        },
    )


def main(task: dict[str, Any]) -> None:
    """Measures all sequence lengths of a task. Rank 0 writes the rows to the task's file."""
    torch.set_num_threads(1)
    # glibc must return each freed array to the system, so that the resident memory is that of live
    # arrays.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)
    dist.init_process_group("unisono")
    limits = (task["rounds"], task["length_s"])
    rows = [measure(task["network"], length, *limits) for length in task["lengths"]]
    if dist.get_rank() == 0:
        Path(task["path"]).write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
