"""Measures how long tokens take to their experts and back: counts, dispatch, combine, and the
backward pass.

The experts compute nothing. Each token chooses 2 of 8 experts at random. The contestants alternate.
Each call checks that every row and its gradient come back; the time includes this check.

- `puts`: `ExpertExchange`, as layouts with `ep` use it
- `all_to_all`: torch's `all_to_all_single` for the counts, then for the rows, on unisono
- `gloo`: the same calls on Gloo

    python benchmarks/expert_exchange.py                     # about 2 minutes
    python benchmarks/expert_exchange.py --ranks 2 --tokens 64,512
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from timing import alternate, calls_within, microseconds, on_every, write
from torch import distributed as dist

from unisono.communicator.explain import time_s
from unisono.parallel.divisible.exchanges import move_rows
from unisono.parallel.layers import ExpertExchange
from unisono.torch_backend import default_communicator

EXPERTS, TOP_K = 8, 2
CONTESTANTS = ("puts", "all_to_all", "gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds of a call in each round, by contestant."""

    ranks: int
    tokens: int
    hidden: int
    seconds: dict[str, tuple[float, ...]]


class CountedExchange:
    """The exchange by torch's `all_to_all_single`: of counts, then of rows."""

    def __init__(self, counts: torch.Tensor, group: dist.ProcessGroup) -> None:
        ranks = dist.get_world_size(group)
        arriving = counts.clone()
        dist.all_to_all_single(arriving, counts, group=group)
        table = arriving.view(ranks, -1)
        self._group = group
        self._sent = counts.view(ranks, -1).sum(1).tolist()
        self._arrived = table.sum(1).tolist()
        experts = torch.arange(table.shape[1]).repeat(ranks)
        self._by_expert = experts.repeat_interleave(arriving).argsort(stable=True)

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        return move_rows(rows, self._group, self._sent, self._arrived)[self._by_expert]

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        back = torch.empty_like(self._by_expert)
        back[self._by_expert] = torch.arange(len(back))
        return move_rows(rows[back], self._group, self._arrived, self._sent)


def exchange(
    make: Callable[[torch.Tensor, Any], Any],
    group: dist.ProcessGroup,
    rows: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Moves rows to their experts and back, and their gradients in the same way."""
    made = make(counts, group)
    rows.grad = None
    back = made.combine(made.dispatch(rows))
    back.backward(rows.detach())
    if not (torch.equal(back, rows) and torch.equal(rows.grad, rows)):  # type: ignore[arg-type]
        raise RuntimeError("a row did not come back")


def measure(tokens: str, hidden: int, rounds: int, round_s: float) -> list[Row]:
    """Measures all contestants on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    comm = default_communicator()
    gloo = dist.new_group(list(range(comm.size)), backend="gloo")
    found = []
    for count in map(int, tokens.split(",")):
        drawn = torch.Generator().manual_seed(comm.rank)
        rows = torch.randn(count * TOP_K, hidden, generator=drawn).requires_grad_()
        chosen = torch.randint(0, EXPERTS, (count * TOP_K,), generator=drawn)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        ways = ((ExpertExchange, dist.group.WORLD), (CountedExchange, dist.group.WORLD),
                (CountedExchange, gloo))  # fmt: skip
        calls = [partial(exchange, make, group, rows, counts) for make, group in ways]
        often = [calls_within(round_s, time_s(comm, call, 3)) for call in calls]
        times = alternate(comm, calls, often, rounds)
        found.append(
            Row(
                ranks=comm.size,
                tokens=count,
                hidden=hidden,
                seconds=dict(zip(CONTESTANTS, times, strict=True)),
            )
        )
    dist.destroy_process_group()
    return found


def render(rows: list[Row]) -> Table:
    """Returns a table with the median and the quartiles over the rounds."""
    table = Table(title=f"tokens to {EXPERTS} experts and back, forward and backward, us")
    for column in ("ranks", "tokens", *CONTESTANTS, "all_to_all / puts", "gloo / puts"):
        table.add_column(column, justify="right")
    for row in rows:
        own, *others = (median(row.seconds[name]) for name in CONTESTANTS)
        table.add_row(
            str(row.ranks),
            str(row.tokens),
            *(microseconds(row.seconds[name]) for name in CONTESTANTS),
            *(f"{other / own:.1f}" for other in others),
        )
    return table


def main(
    *,
    ranks: Annotated[str, typer.Option(help="Rank counts, separated by commas.")] = "2,4",
    tokens: Annotated[str, typer.Option(help="Tokens of each rank.")] = "64,512,4096",
    hidden: Annotated[int, typer.Option(help="Elements of a row, float32.")] = 256,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of each contestant.")] = 15,
    round_s: Annotated[
        float, typer.Option(help="Approximate seconds of each contestant in a round.")
    ] = 0.2,
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")] = Path(
        __file__
    ).parent
    / "results"
    / "expert-exchange.json",
) -> None:
    rows, probes_s = on_every(ranks, measure, (tokens, hidden, rounds, round_s))
    write(json_path, rows, probes_s)
    Console().print(render(rows))


if __name__ == "__main__":
    typer.run(main)
