"""The command `unisono plan`. This module is fast to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from unisono.commands.command_options import with_options
from unisono.commands.outputs import print_written, result_console, write_json
from unisono.commands.planning.plan_options import PlanOptions

if TYPE_CHECKING:
    from unisono.commands.planning.layout_tables import PlanOutput


@with_options(PlanOptions)
def plan(context: typer.Context, options: PlanOptions) -> None:
    """Find the best layouts of a training run, with their time and memory.

    The times have an interval that holds 80 % of measured steps.

    With --layout, predict one layout. With --like, predict another framework's job. --pareto and
    --scaling compare numbers of devices. With --calibrate, make a calibration from own
    measurements.
    """
    try:
        options.check()
        found = _output(options)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    console = result_console(options.json_path)
    for part in found.parts:
        if isinstance(part, str):
            console.print(part, highlight=False, soft_wrap=True)
        else:
            console.print(part)
    print_written(console, found.written)
    write_json(found.document, options.json_path)


def _output(options: PlanOptions) -> PlanOutput:
    if options.calibrate:
        from unisono.commands.planning.own_measurements import calibration_output

        return calibration_output(options)
    if options.like is not None:
        from unisono.commands.planning.like_tables import like_output

        return like_output(options)
    return _plan(options)


def _plan(options: PlanOptions) -> PlanOutput:
    from unisono.commands.planning import layout_tables, scaling_cost_tables
    from unisono.commands.planning.plan_inputs import read_inputs
    from unisono.planner.recommendation import is_dlrm

    if options.model is not None and is_dlrm(options.model):
        from unisono.commands.planning.dlrm_tables import dlrm_output

        return dlrm_output(options)
    if options.placement is not None:
        raise ValueError("--placement is for recommendation models (dlrm-...)")
    if options.table_update != "rows":
        raise ValueError("--table-update is for recommendation models (dlrm-...)")
    inputs = read_inputs(options)
    if options.pareto:
        return layout_tables.front_output(inputs, options)
    if options.scaling:
        return scaling_cost_tables.scaling_output(inputs, options)
    found, best = layout_tables.layouts_output(inputs, options)
    more: list[tuple[str, Any, Any]] = scaling_cost_tables.of_best(inputs, options, best)
    for name, part, document in more:
        found.parts.append(part)
        found.document[name] = document
    return found
