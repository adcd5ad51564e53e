"""Options of `unisono simulate`; fast to import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unisono.commands.outputs import JsonOption, given, result_console, writable, write_json


def simulate(
    context: typer.Context,
    *,
    op: Annotated[str, typer.Argument(metavar="OPERATION", help="Such as all_reduce.")],
    algorithm: Annotated[
        str | None, typer.Argument(help="Such as ring; by default those of --compare.")
    ] = None,
    topology_spec: Annotated[
        str,
        typer.Option(
            "--topology", "-t", metavar="SPEC|FILE", help=("Network, as for `unisono topo`.")
        ),
    ],
    size: Annotated[str, typer.Option(help="N: bytes of a rank's whole vector.")] = "64M",
    names: Annotated[
        str,
        typer.Option(
            "--compare", metavar="all|NAMES", help=("Algorithms, separated by semicolons.")
        ),
    ] = "all",
    levels: Annotated[
        str | None, typer.Option(metavar="4x8", help="Sizes of groups, innermost first.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Sizes for the picture of --svg.")] = "1K:1G:x8",
    svg_path: Annotated[
        Path | None,
        typer.Option("--svg", callback=writable, metavar="FILE", help="Draw times over sizes."),
    ] = None,
    heat_path: Annotated[
        Path | None,
        typer.Option(
            "--heat", callback=writable, metavar="FILE", help=("Draw link traffic over time (SVG).")
        ),
    ] = None,
    trace_path: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            callback=writable,
            metavar="FILE",
            help=("Write a trace for Perfetto or Chrome."),
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="Vary ranks, hosts, bandwidth, or an option of the network.",
        ),
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help=("Computation per step, such as 10ms; adds scale factors to --sweep."),
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Also try numbers of channels and orders of ranks.")
    ] = False,
    budget: Annotated[
        float, typer.Option(min=0, help="Seconds for --search, or for comparing all algorithms.")
    ] = 60.0,
    model_path: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="FILE", help=("Link models of `unisono calibrate`, or measurements.")
        ),
    ] = None,
    overhead: Annotated[
        float, typer.Option(help="Seconds before each message leaves its rank.")
    ] = 0.0,
    failed: Annotated[
        str,
        typer.Option(
            metavar="LINK,...",
            help="Failed directed links: ids, or 0-1 for all from node 0 to node 1.",
        ),
    ] = "",
    degraded: Annotated[
        str,
        typer.Option(
            metavar="LINK=PART,...",
            help=("Slow links with the remaining fraction of their rate, such as 0-1=0.5."),
        ),
    ] = "",
    in_network: Annotated[
        bool, typer.Option("--in-network", help="Let capable switches reduce and copy.")
    ] = False,
    paths: Annotated[int, typer.Option(min=1, help="Paths over which each message is spread.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the choice among equal paths.")] = 0,
    json_path: JsonOption = None,
) -> None:
    """Simulate the schedules of an operation on a network that need not exist.

    Prints a comparison: time, bandwidths as in nccl-tests, the busiest link, and the time's ratio
    to a lower bound. The bound follows from the network's bandwidths; no algorithm can beat it.
    --trace and --heat apply to the named algorithm, else to the fastest.

    --sweep hosts=2,4,8 prints the fastest algorithm for each value; --svg draws all over the
    values. ranks and hosts select the first ones of the network. bandwidth=100Gbit,400Gbit and
    latency apply to links. radix, oversubscription and others are options of the network.
    """
    from unisono.bench import parse_size
    from unisono.commands.simulate import comparison, request, search_result, what_if
    from unisono.topology import load
    from unisono.types import Op

    try:
        if op not in list(Op):
            raise ValueError(f"{op} is not one of the operations {', '.join(Op)}")
        if op == Op.BARRIER:
            raise ValueError("a barrier moves no data, so there is nothing to simulate")
        _check(
            sweep=sweep is not None,
            search=search,
            compute=compute is not None,
            svg=svg_path,
            others=(heat_path, trace_path),
        )
        _check_given(context)
        topology = load(topology_spec)
        model = (
            None if model_path is None else request.read_model(model_path, op, topology.num_ranks)
        )
        work = request.SimulationRequest(
            op=op,
            spec=topology_spec,
            topology=topology,
            nbytes=parse_size(size),
            names=request.read_names(op, algorithm, names),
            levels=request.read_levels(levels),
            conditions=request.read_conditions(
                topology=topology,
                overhead=overhead,
                failed=failed,
                degraded=degraded,
                in_network=in_network,
                paths=paths,
                seed=seed,
                model=model,
            ),
            details=request.Details(
                heat_path=heat_path, trace_path=trace_path, critical=algorithm is not None
            ),
            budget_s=budget,
        )
        request.check_levels(work)
        if in_network and not topology.nodes.reduces.any():
            raise ValueError(f"--in-network: {topology.name} has no switch that reduces")
        with request.progress() as show:
            if sweep is not None:
                found = what_if.run(work, sweep, compute, svg_path, show)
            elif search:
                found = search_result.run(work, budget, show)
            else:
                found = comparison.run(work, svg_path, sizes, show)
        for path, text in found.files:
            path.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    console = result_console(json_path)
    console.print(found.table)
    for line in found.lines:
        console.print(line, highlight=False, soft_wrap=True)
    for path, _ in found.files:
        console.print(f"written: {path}", style="dim", highlight=False, soft_wrap=True)
    write_json(found.document, json_path)


def _check_given(context: typer.Context) -> None:
    """Refuses options that the request would ignore."""
    every = context.params["algorithm"] is None and context.params["names"].strip() == "all"
    if context.params["algorithm"] is not None and given(context, "names"):
        raise ValueError("--compare cannot be combined with a named algorithm")
    if given(context, "sizes") and (
        context.params["svg_path"] is None or context.params["sweep"] is not None
    ):
        raise ValueError("--sizes needs --svg without --sweep")
    if given(context, "budget") and not (every or context.params["search"]):
        raise ValueError(
            "--budget needs --search or all algorithms; named algorithms have no limit"
        )


def _check(
    *,
    sweep: bool,
    search: bool,
    compute: bool,
    svg: Path | None,
    others: tuple[Path | None, Path | None],
) -> None:
    """Refuses options that exclude each other."""
    heat, trace = others
    for path in (svg, heat):
        if path is not None and path.suffix != ".svg":
            raise ValueError(f"{path}: the file name must end in .svg")
    if sweep and search:
        raise ValueError("use either --sweep or --search, not both")
    if sweep and (heat is not None or trace is not None):
        raise ValueError(
            "--heat and --trace apply to one network, so they cannot be combined with --sweep"
        )
    if compute and not sweep:
        raise ValueError("--compute needs --sweep")
    if search and svg is not None:
        raise ValueError("--search draws no chart; use --heat or --trace for its result")
