"""The options of `unisono bench`, some of which other commands share. This module is fast to
import."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Annotated

import typer

from unisono.commands.outputs import JsonOption, given, writable
from unisono.types import DType, Op, ReduceOp


class Api(StrEnum):
    """The interface of Unisono that is measured: its own communicator, or its backend for
    torch.distributed."""

    NATIVE = "native"
    TORCH = "torch"


class Device(StrEnum):
    """Device of the tensors."""

    CPU = "cpu"
    CUDA = "cuda"

    @property
    def of_contestants(self) -> str:
        """The device of `unisono.bench.Contestant`: empty for the CPU, whose arrays are sent
        themselves."""
        return "" if self is Device.CPU else self.value


DeviceOption = Annotated[
    Device,
    typer.Option(
        "--device",
        help="Where the tensors are. With cuda, the ranks share the GPUs if these are fewer.",
    ),
]
LabHosts = Annotated[
    int | None,
    typer.Option("--hosts", min=2, max=250, help="Hosts of a lab on this machine (needs root)."),
]
PerHostOption = Annotated[int, typer.Option(min=1, help="Ranks on each of these hosts.")]
RateOption = Annotated[
    str | None, typer.Option(help="Rate of each link, such as 1gbit; by default unlimited.")
]
RailsOption = Annotated[int, typer.Option(min=1, help="Links of each host.")]
DelayOption = Annotated[
    str | None, typer.Option(help="Delay added between hosts in each direction, such as 1ms.")
]
RanksOption = Annotated[
    int, typer.Option("--ranks", "-n", min=1, help=("Number of ranks (processes)."))
]


def _names(members: Iterable[IntEnum]) -> str:
    return ", ".join(member.name.lower() for member in sorted(members))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of `unisono bench`, as given on the command line."""

    op: Annotated[
        str,
        typer.Argument(
            help=f"Operation, or several separated by commas: {', '.join(Op)}, send_recv, "
            "put, ping_pong, stream, reduce_scatter_v, all_gather_v, all_to_all_v, gather_v, "
            "scatter_v."
        ),
    ]
    ranks: RanksOption = 4
    hosts: LabHosts = None
    per_host: PerHostOption = 1
    rate: RateOption = None
    rails: RailsOption = 1
    delay: DelayOption = None
    sizes: Annotated[
        str, typer.Option(help=("Message sizes: 8,64K,1.5M, or a range: 8:64M:x8."))
    ] = "8:64M:x8"
    dtype: Annotated[str, typer.Option(help=f"Element type: {_names(DType)}.")] = "float32"
    redop: Annotated[
        str, typer.Option(help=f"Reduction: {_names(set(ReduceOp) - {ReduceOp.PREMUL_SUM})}.")
    ] = "sum"
    root: Annotated[int, typer.Option(help="Root of broadcast, reduce, gather, scatter.")] = 0
    against: Annotated[
        str,
        typer.Option(
            help=(
                "Peers to compare with: gloo, openmpi, mpich, impi (Intel MPI in the folder "
                "I_MPI_ROOT), unisono:ALGORITHM, unisono-shared (arrays of Communicator.empty), "
                "unisono-tls; with --device cuda: gloo, nccl."
            )
        ),
    ] = "gloo,openmpi,mpich"
    device: DeviceOption = Device.CPU
    api: Annotated[
        Api, typer.Option(help="Interface of unisono: the communicator, or torch.distributed.")
    ] = Api.NATIVE
    rounds: Annotated[
        int, typer.Option(min=1, help=("Measurement rounds; in each, every contestant runs once."))
    ] = 7
    round_s: Annotated[
        float, typer.Option(help=("Approximate seconds of one contestant in one round."))
    ] = 0.03
    time_budget: Annotated[
        float | None, typer.Option(help="Approximate limit of the whole run, in seconds.")
    ] = None
    bind: Annotated[
        bool, typer.Option("--bind", help="Keep rank r of every contestant on core r mod cores.")
    ] = False
    json_path: JsonOption = None
    plot_path: Annotated[
        Path | None,
        typer.Option("--plot", callback=writable, help="Write a PNG (needs the plot extra)."),
    ] = None
    predict_path: Annotated[
        Path | None,
        typer.Option(
            "--predict",
            metavar="FILE",
            help=("Also print times predicted by the link models of this file."),
        ),
    ] = None

    def check(self, context: typer.Context) -> None:
        """Raises ValueError for options that have no effect."""
        if self.hosts is not None and given(context, "ranks"):
            raise ValueError(
                "-n cannot be combined with --hosts; --per-host sets the ranks on each host"
            )
        needs_hosts = self.rate is not None or self.delay is not None
        if self.hosts is None and (needs_hosts or (self.per_host, self.rails) != (1, 1)):
            raise ValueError("--per-host, --rate, --rails and --delay need --hosts")
        if self.device is not Device.CPU and self.hosts is not None:
            raise ValueError("--device cuda cannot be combined with --hosts")
        if self.device is not Device.CPU and self.predict_path is not None:
            raise ValueError("--device cuda cannot be combined with --predict")
        if self.device is not Device.CPU and not given(context, "against"):
            raise ValueError("--device cuda needs --against, such as gloo,nccl")
