"""The command `unisono simulate`. This module is fast to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from unisono.commands.command_options import with_options
from unisono.commands.outputs import print_written, result_console, write_json
from unisono.commands.simulate.options import SimulateOptions

if TYPE_CHECKING:
    from unisono.commands.simulate.simulation_request import Output, SimulationRequest


@with_options(SimulateOptions)
def simulate(context: typer.Context, options: SimulateOptions) -> None:
    """Simulate an operation, or a pipeline schedule, on a network that need not exist.

    Prints a comparison: time, bandwidths as in nccl-tests, the busiest link, and the time's ratio
    to a lower bound. The bound follows from the network's bandwidths; no algorithm can beat it.
    --trace and --heat apply to the named algorithm, else to the fastest.

    --sweep hosts=2,4,8 prints the fastest algorithm for each value; --svg draws all over the
    values. ranks and hosts select the first ones of the network. bandwidth=100Gbit,400Gbit and
    latency apply to links. radix, oversubscription and others are options of the network.

    `unisono show 1f1b --json FILE` writes the file of a pipeline schedule. Each pass takes its time
    in the file, and all messages share the links. Prints the step time, the bubble, and the time by
    which the messages lengthen the step.
    """
    from unisono.commands.simulate import pipeline
    from unisono.commands.simulate.simulation_request import read_request

    try:
        options.check(context)
        if options.is_pipeline:
            found = pipeline.run(options)
        else:
            found = _run(read_request(options), options)
        for path, text in found.files:
            path.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    console = result_console(options.json_path)
    console.print(found.table)
    for line in found.lines:
        console.print(line, highlight=False, soft_wrap=True)
    print_written(console, [path for path, _ in found.files])
    write_json(found.document, options.json_path)


def _run(task: SimulationRequest, options: SimulateOptions) -> Output:
    from unisono.commands.simulate import comparison, search_result, simulation_request, sweep

    with simulation_request.progress() as show:
        if options.sweep is not None:
            return sweep.run(task, options.sweep, options.compute, options.svg_path, show)
        if options.search:
            return search_result.run(task, options.budget, show)
        return comparison.run(task, options.svg_path, options.sizes, show)
