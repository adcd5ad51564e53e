"""The command line of `unisono bench`, `check`, `explain`, `prove`: options, fast to import."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Annotated

import typer

from unisono.commands.outputs import JsonOption, result_console, writable, write_json
from unisono.types import DType, Op, ReduceOp


class Api(StrEnum):
    """Which of our interfaces is measured."""

    NATIVE = "native"
    TORCH = "torch"


LabHosts = Annotated[
    int | None,
    typer.Option("--hosts", min=2, max=250, help="Hosts of a lab on this machine (root)."),
]
PerHostOption = Annotated[int, typer.Option(min=1, help="Ranks on each of these hosts.")]
RateOption = Annotated[
    str | None, typer.Option(help="Limit of each link, such as 1gbit; by default none.")
]
RailsOption = Annotated[int, typer.Option(min=1, help="Links of each host.")]
DelayOption = Annotated[
    str | None, typer.Option(help="Added on the way from host to host, such as 1ms.")
]
RanksOption = Annotated[int, typer.Option("--ranks", "-n", min=1, help="Ranks (processes).")]


def _names(members: Iterable[IntEnum]) -> str:
    return ", ".join(member.name.lower() for member in sorted(members))


def bench(
    context: typer.Context,
    *,
    op: Annotated[
        str,
        typer.Argument(
            help=f"Operation, or several separated by commas: {', '.join(Op)}, send_recv, "
            "ping_pong, stream, reduce_scatter_v, all_gather_v, all_to_all_v, gather_v, scatter_v."
        ),
    ],
    ranks: RanksOption = 4,
    hosts: LabHosts = None,
    per_host: PerHostOption = 1,
    rate: RateOption = None,
    rails: RailsOption = 1,
    delay: DelayOption = None,
    sizes: Annotated[str, typer.Option(help="8,64K,1.5M, or a range: 8:64M:x8.")] = "8:64M:x8",
    dtype: Annotated[str, typer.Option(help=f"Element type: {_names(DType)}.")] = "float32",
    redop: Annotated[
        str, typer.Option(help=f"Reduction: {_names(set(ReduceOp) - {ReduceOp.PREMUL_SUM})}.")
    ] = "sum",
    root: Annotated[int, typer.Option(help="Root of broadcast, reduce, gather, scatter.")] = 0,
    against: Annotated[
        str, typer.Option(help="Peers: gloo, openmpi, mpich, unisono:ALGORITHM, unisono-tls.")
    ] = "gloo,openmpi,mpich",
    api: Annotated[
        Api, typer.Option(help="Ours: the communicator, or torch.distributed.")
    ] = Api.NATIVE,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every contestant.")] = 7,
    round_s: Annotated[float, typer.Option(help="About how long one turn takes.")] = 0.03,
    time_budget: Annotated[
        float | None, typer.Option(help="About how many seconds the run may take.")
    ] = None,
    bind: Annotated[
        bool, typer.Option("--bind", help="Keep rank r of every contestant on core r mod cores.")
    ] = False,
    json_path: JsonOption = None,
    plot_path: Annotated[
        Path | None,
        typer.Option("--plot", callback=writable, help="Write a PNG (needs the plot extra)."),
    ] = None,
    predict_path: Annotated[
        Path | None,
        typer.Option("--predict", metavar="FILE", help="Show what link models foretell, too."),
    ] = None,
) -> None:
    """Measure operations beside other libraries and the limit of the memory or the network.

    ping_pong and stream are messages between ranks 0 and 1, 2 and 3, ...: half a round trip; one
    way, with 64 outstanding (of large ones, 128 MiB). The time shown is that of one message.
    Of the v forms (such as all_gather_v), pieces grow from rank to rank as 1, 2, 3, ... What a peer
    does not have, it is left out of.
    All contestants take turns in one run, and every rank checks every element of every result: a
    wrong one ends with exit code 1. With --hosts, ranks run on hosts of a lab: network namespaces
    of this machine, with links as fast as --rate says.
    """
    from unisono.bench import OURS, Pace, parse_sizes, read_models
    from unisono.commands.bench_run import BenchRequest, Hosts, execute, split_names
    from unisono.errors import UnsupportedError

    try:
        ops, all_sizes = split_names(op), parse_sizes(sizes)
        rows = max(1, len(ops) * len(all_sizes))
        lab = None
        if hosts is not None:
            source = context.get_parameter_source("ranks")
            if source is not None and source.name == "COMMANDLINE":
                raise ValueError("-n goes without --hosts, which has --per-host ranks on each")
            lab = Hosts(hosts=hosts, per_host=per_host, rate=rate, rails=rails, delay=delay)
        elif rate is not None or delay is not None or (per_host, rails) != (1, 1):
            raise ValueError("--per-host, --rate, --rails and --delay go with --hosts")
        budget_s = None if time_budget is None else time_budget / rows
        request = BenchRequest(
            ops=ops,
            ranks=ranks if lab is None else lab.ranks,
            hosts=lab,
            sizes=all_sizes,
            dtype=dtype,
            redop=redop,
            root=root,
            ours=OURS[api.value],
            against=split_names(against),
            pace=Pace(rounds=rounds, round_s=round_s, row_budget_s=budget_s),
            bind=bind,
            json_path=json_path,
            plot_path=plot_path,
            models=() if predict_path is None else read_models(predict_path, ops),
        )
    except (ValueError, OSError, UnsupportedError) as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(execute(request))


def check(*, ranks: RanksOption = 4, json_path: JsonOption = None) -> None:
    """Show whether this machine works: every operation, several types and sizes, against NumPy."""
    from unisono.bench import render_checks, run_checks

    checks = run_checks(ranks)
    result_console(json_path).print(render_checks(checks))
    write_json(checks.to_dict(), json_path)
    raise typer.Exit(0 if checks.passed else 1)


def explain(
    *,
    op: Annotated[str, typer.Argument(help="Operation, such as all_reduce.")],
    nbytes: Annotated[str, typer.Argument(help="Size, such as 8, 64K, 16M.")],
    ranks: RanksOption = 4,
    json_path: JsonOption = None,
) -> None:
    """Say which algorithm an operation of this size uses, and why.

    The rule, whether it comes from the environment, a file, what is built in or the cost model;
    predicted time, and the time that it takes now; the runner-up.
    """
    from unisono.bench import explain_choice, parse_size

    try:
        explanation = explain_choice(op, parse_size(nbytes), ranks)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    result_console(json_path).print(str(explanation), highlight=False, soft_wrap=True)
    write_json({**asdict(explanation), "text": str(explanation)}, json_path)


def prove(
    *,
    files: Annotated[
        list[Path], typer.Argument(help="MSCCL XML, MSCCL++ JSON, or a schedule as JSON.")
    ],
    run_ranks: Annotated[
        int,
        typer.Option(
            "--run",
            min=0,
            metavar="RANKS",
            help="Run what is proved for up to so many ranks, too, against NumPy.",
        ),
    ] = 0,
    json_path: JsonOption = None,
) -> None:
    """Say whether algorithm files do what they claim, and if not, why.

    Exit code 1 if one is refused, or gives results other than NumPy's.
    """
    from unisono.bench import judge, render_verdicts, run_proved

    verdicts = [judge(path) for path in files]
    if run_ranks:
        verdicts = run_proved(verdicts, run_ranks)
    result_console(json_path).print(render_verdicts(verdicts))
    write_json({"files": [asdict(v) for v in verdicts]}, json_path)
    raise typer.Exit(0 if all(v.good for v in verdicts) else 1)
