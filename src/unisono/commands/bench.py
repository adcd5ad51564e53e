"""Options of `unisono bench`, `check`, `explain` and `prove`; fast to import."""

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
    """The interface of unisono that is measured."""

    NATIVE = "native"
    TORCH = "torch"


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


def bench(
    context: typer.Context,
    *,
    op: Annotated[
        str,
        typer.Argument(
            help=f"Operation, or several separated by commas: {', '.join(Op)}, send_recv, "
            "ping_pong, stream, reduce_scatter_v, all_gather_v, all_to_all_v, gather_v, "
            "scatter_v."
        ),
    ],
    ranks: RanksOption = 4,
    hosts: LabHosts = None,
    per_host: PerHostOption = 1,
    rate: RateOption = None,
    rails: RailsOption = 1,
    delay: DelayOption = None,
    sizes: Annotated[
        str, typer.Option(help=("Message sizes: 8,64K,1.5M, or a range: 8:64M:x8."))
    ] = "8:64M:x8",
    dtype: Annotated[str, typer.Option(help=f"Element type: {_names(DType)}.")] = "float32",
    redop: Annotated[
        str, typer.Option(help=f"Reduction: {_names(set(ReduceOp) - {ReduceOp.PREMUL_SUM})}.")
    ] = "sum",
    root: Annotated[int, typer.Option(help="Root of broadcast, reduce, gather, scatter.")] = 0,
    against: Annotated[
        str,
        typer.Option(
            help=("Peers to compare with: gloo, openmpi, mpich, unisono:ALGORITHM, unisono-tls.")
        ),
    ] = "gloo,openmpi,mpich",
    api: Annotated[
        Api, typer.Option(help="Interface of unisono: the communicator, or torch.distributed.")
    ] = Api.NATIVE,
    rounds: Annotated[
        int, typer.Option(min=1, help=("Measurement rounds; in each, every contestant runs once."))
    ] = 7,
    round_s: Annotated[
        float, typer.Option(help=("Approximate seconds of one contestant in one round."))
    ] = 0.03,
    time_budget: Annotated[
        float | None, typer.Option(help="Approximate limit of the whole run, in seconds.")
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
        typer.Option(
            "--predict",
            metavar="FILE",
            help=("Also print times predicted by the link models of this file."),
        ),
    ] = None,
) -> None:
    """Measure operations next to other libraries and the limit of the memory or the network.

    ping_pong and stream send messages between ranks 0 and 1, 2 and 3, and so on. ping_pong measures
    half a round trip. stream sends one way, with up to 64 messages or 128 MiB outstanding. Times
    are per message. In the v forms (such as all_gather_v), pieces grow from rank to rank as 1, 2,
    3, ... A peer is skipped for operations that it lacks.
    All contestants alternate in one run. Every rank checks every element of every result; a wrong
    element ends with exit code 1. With --hosts, ranks run on hosts of a lab: network namespaces of
    this machine, with links as fast as --rate allows.
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
                raise ValueError(
                    "-n cannot be combined with --hosts; --per-host sets the ranks on each host"
                )
            lab = Hosts(hosts=hosts, per_host=per_host, rate=rate, rails=rails, delay=delay)
        elif rate is not None or delay is not None or (per_host, rails) != (1, 1):
            raise ValueError("--per-host, --rate, --rails and --delay need --hosts")
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
    """Check that this machine works: every operation, several types and sizes, against NumPy."""
    from unisono.bench import render_checks, run_checks

    checks = run_checks(ranks)
    result_console(json_path).print(render_checks(checks))
    write_json(checks.to_dict(), json_path)
    raise typer.Exit(0 if checks.passed else 1)


def explain(
    *,
    op: Annotated[str, typer.Argument(help="Operation, such as all_reduce.")],
    nbytes: Annotated[str, typer.Argument(help="Message size, such as 8, 64K, 16M.")],
    ranks: RanksOption = 4,
    json_path: JsonOption = None,
) -> None:
    """Explain which algorithm an operation of this size uses.

    Prints the selection rule and its origin: the environment, a file, the built-in rules or the
    cost model. Also prints the predicted time, the time measured now, and the second-best
    algorithm.
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
            help="Also run proved algorithms for up to this many ranks, against NumPy.",
        ),
    ] = 0,
    json_path: JsonOption = None,
) -> None:
    """Prove that algorithm files are correct, or explain why they are not.

    The exit code is 1 if a file is refused or its results differ from NumPy's.
    """
    from unisono.bench import judge, render_verdicts, run_proved

    verdicts = [judge(path) for path in files]
    if run_ranks:
        verdicts = run_proved(verdicts, run_ranks)
    result_console(json_path).print(render_verdicts(verdicts))
    write_json({"files": [asdict(v) for v in verdicts]}, json_path)
    raise typer.Exit(0 if all(v.good for v in verdicts) else 1)
