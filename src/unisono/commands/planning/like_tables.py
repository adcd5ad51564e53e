"""Tables and JSON of another framework's job, and of the layouts that are better."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import exp
from typing import Any

from unisono.commands.planning.layout_tables import (
    PlanOutput,
    candidate_document,
    fit_text,
    layout_table,
    prediction_document,
    search_parts,
    searched,
)
from unisono.commands.planning.plan_inputs import read_similar
from unisono.commands.planning.plan_options import PlanOptions
from unisono.job_files import SimilarJob
from unisono.planner import Candidates, Prediction, predict


def like_output(options: PlanOptions) -> PlanOutput:
    """Returns the prediction of a job, how its file was read, and a search for better layouts with
    the same software. Raises ValueError.
    """
    inputs, job = read_similar(options)
    assert inputs.layout is not None
    step = predict(
        inputs.model, inputs.cluster, inputs.layout, inputs.job, calibration=inputs.calibration
    )
    parts: list[Any] = [layout_table([step], options, inputs.title), *job.lines()]
    if not step.fits:
        parts.append(fit_text(step, inputs))
    software = inputs.job.software_of(step.layout)
    work = replace(inputs.job, micro_batch=None, recompute=None, software=software)
    found: Candidates | None = None
    try:
        found = searched(replace(inputs, job=work, layout=None), options)
    except ValueError as error:
        parts.append(str(error))
    else:
        parts += search_parts(found, options, f"the best layouts with {software}")
        parts.append(_comparison(step, found))
    if options.explain:
        parts.append(str(step.explain()))
    written = []
    if options.save_path is not None and found is not None:
        found[0].layout.save(options.save_path)
        written.append(options.save_path)
    document = {
        "job": {**prediction_document(step), **_reading(job)},
        "layouts": [candidate_document(each) for each in found or ()],
    }
    return PlanOutput(parts=parts, document=document, written=written)


def _comparison(step: Prediction, found: Candidates) -> str:
    best = found[0].prediction
    saved = 1 - best.step_s / step.step_s
    if saved < 1e-6:
        return "no layout is predicted to be faster than the job"
    chance = best.chance_against(step)
    spread = exp(1.2816 * best.ratio_deviation(step)) - 1
    return (
        f"row 1 takes {saved:.1%} less time than the job (80 % interval of the ratio: within "
        f"{spread:.0%}); it is faster with a probability of {chance:.0%}"
    )


def _reading(job: SimilarJob) -> dict[str, Any]:
    """Returns how the file was read, as JSON."""
    names = ("source", "notes", "assumed", "without_effect", "unknown", "devices")
    return {
        **{name: getattr(job, name) for name in names},
        "model": None if job.model is None else asdict(job.model),
    }
