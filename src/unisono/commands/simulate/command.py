"""The command `unisono simulate`: options only, fast to import."""

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
        str | None, typer.Argument(help="Such as ring; left out, --compare says which.")
    ] = None,
    topology_spec: Annotated[
        str, typer.Option("--topology", "-t", metavar="SPEC|FILE", help="As for `unisono topo`.")
    ],
    size: Annotated[str, typer.Option(help="N: bytes of a rank's whole vector.")] = "64M",
    names: Annotated[
        str, typer.Option("--compare", metavar="all|NAMES", help="Algorithms, with semicolons.")
    ] = "all",
    levels: Annotated[
        str | None, typer.Option(metavar="4x8", help="Sizes of groups, innermost first.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Sizes of the picture of --svg.")] = "1K:1G:x8",
    svg_path: Annotated[
        Path | None,
        typer.Option("--svg", callback=writable, metavar="FILE", help="Times against sizes."),
    ] = None,
    heat_path: Annotated[
        Path | None,
        typer.Option("--heat", callback=writable, metavar="FILE", help="Links over time (SVG)."),
    ] = None,
    trace_path: Annotated[
        Path | None,
        typer.Option("--trace", callback=writable, metavar="FILE", help="For Perfetto or Chrome."),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="What if: ranks, hosts, bandwidth, or an option of the network, by value.",
        ),
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Such as 10ms a step: adds scale factors to --sweep."),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Try channels and orders of the ranks, too.")
    ] = False,
    budget: Annotated[
        float, typer.Option(min=0, help="Seconds of --search, or to compare all.")
    ] = 60.0,
    model_path: Annotated[
        Path | None,
        typer.Option("--model", metavar="FILE", help="Of `unisono calibrate`, or measurements."),
    ] = None,
    overhead: Annotated[
        float, typer.Option(help="Seconds before each message leaves its rank.")
    ] = 0.0,
    failed: Annotated[
        str,
        typer.Option(
            metavar="LINK,...",
            help="Directed links that are gone: ids, or 0-1 from node 0 to node 1.",
        ),
    ] = "",
    degraded: Annotated[
        str,
        typer.Option(
            metavar="LINK=PART,...", help="Such as 0-1=0.5: links with a part of their rate left."
        ),
    ] = "",
    in_network: Annotated[
        bool, typer.Option("--in-network", help="Switches that can reduce and copy do so.")
    ] = False,
    paths: Annotated[int, typer.Option(min=1, help="Ways that a message is spread over.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the choice among equal ways.")] = 0,
    json_path: JsonOption = None,
) -> None:
    """Run the schedules of an operation on a network that need not exist.

    Prints the league table: time, bandwidths in nccl-tests' terms, the busiest link, and how near
    the time is to the bound of the network's bandwidths, which no algorithm can beat. --trace and
    --heat are of the algorithm that is given, else of the fastest.

    --sweep hosts=2,4,8 shows the fastest for each value, and --svg all over the values: of ranks or
    hosts the first take part; bandwidth=100Gbit,400Gbit and latency are of links; radix,
    oversubscription and the like are the network's own options.
    """
    from unisono.bench import parse_size
    from unisono.commands.simulate import comparison, request, search_result, what_if
    from unisono.topology import load
    from unisono.types import Op

    try:
        if op not in list(Op):
            raise ValueError(f"{op} is none of the operations {', '.join(Op)}")
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
            told=request.Details(
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
    """Refuses options that what is asked for would leave unread."""
    every = context.params["algorithm"] is None and context.params["names"].strip() == "all"
    if context.params["algorithm"] is not None and given(context, "names"):
        raise ValueError("--compare is for when no algorithm is named before it")
    if given(context, "sizes") and (
        context.params["svg_path"] is None or context.params["sweep"] is not None
    ):
        raise ValueError("--sizes are of the picture of --svg, without --sweep")
    if given(context, "budget") and not (every or context.params["search"]):
        raise ValueError("--budget goes with --search or all algorithms: named ones have no limit")


def _check(
    *,
    sweep: bool,
    search: bool,
    compute: bool,
    svg: Path | None,
    others: tuple[Path | None, Path | None],
) -> None:
    """Refuses what does not go together."""
    heat, trace = others
    for path in (svg, heat):
        if path is not None and path.suffix != ".svg":
            raise ValueError(f"{path}: the name of this file must end in .svg")
    if sweep and search:
        raise ValueError("--sweep or --search, not both")
    if sweep and (heat is not None or trace is not None):
        raise ValueError("--heat and --trace are of one network, so they do not go with --sweep")
    if compute and not sweep:
        raise ValueError("--compute goes with --sweep")
    if search and svg is not None:
        raise ValueError("--search draws no chart; --heat and --trace show what it has found")
