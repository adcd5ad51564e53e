"""The commands `unisono bench`, `check`, `explain` and `prove`. This module is fast to import."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from unisono.commands.bench_options import BenchOptions, Device, DeviceOption, RanksOption
from unisono.commands.command_options import with_options
from unisono.commands.outputs import JsonOption, result_console, write_json


@with_options(BenchOptions)
def bench(context: typer.Context, options: BenchOptions) -> None:
    """Measure operations next to other libraries and the limit of the memory or the network.

    ping_pong and stream send messages between ranks 0 and 1, 2 and 3, and so on. ping_pong measures
    half a round trip. stream sends one way, with up to 64 messages or 128 MiB outstanding. Times
    are per message. In the v forms (such as all_gather_v), pieces grow from rank to rank as 1, 2,
    3, ... A peer is skipped for operations that it lacks.
    All contestants alternate in one run. Every rank checks every element of every result; a wrong
    element ends with exit code 1. With --hosts, ranks run on hosts of a lab: network namespaces of
    this machine, with links as fast as --rate allows.
    """
    from unisono.commands.bench_run import execute, read_request
    from unisono.errors import UnsupportedError

    try:
        options.check(context)
        request = read_request(options)
    except (ValueError, OSError, UnsupportedError) as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(execute(request))


def check(
    *, ranks: RanksOption = 4, device: DeviceOption = Device.CPU, json_path: JsonOption = None
) -> None:
    """Check that this machine works: every operation, several types and sizes, against NumPy.

    With --device cuda, the operations of the torch backend on CUDA tensors.
    """
    from unisono.bench import render_checks, require_device, run_checks

    require_device(device.of_contestants)
    checks = run_checks(ranks, device.of_contestants)
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
