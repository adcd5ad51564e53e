"""Errors of Calculon on the published runs that it can predict, beside those of the planner.

`python planner_fit/calculon_errors.py FOLDER`, with a checkout of github calculon-ai/calculon
(Isaev et al., SC 2023). Calculon has its own system file for A100, including the network, and no
models with gated activations, grouped queries, experts or split backward passes. The choices that a
source leaves open are those of the planner.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from published_runs import PublishedRun, grouped, predict_run, published_runs

from unisono.planner import Prediction
from unisono.planner.inputs.workload import EAGER

_RECOMPUTE = {"none": "none", "selective": "attn_only", "full": "full"}


def both_can(run: PublishedRun) -> bool:
    """Returns True for runs of GPTs on A100 with Megatron-LM before fused attention."""
    model, layout = run.model, run.layout
    plain = not (model.experts or model.gated) and model.kv_heads in (0, model.heads)
    plain = plain and layout.cp == 1 and layout.zero < 2 and layout.schedule == "1f1b"
    return plain and run.cluster.kind.name.startswith("A100") and run.job.software in EAGER


def execution(found: Prediction) -> dict[str, Any]:
    """Returns Calculon's description of a layout and its choices."""
    layout, job = found.layout, found.job
    outside = int(layout.devices > 8)
    overlaps = ("data_par_overlap", "weight_offload", "activations_offload", "optimizer_offload")
    return {
        **dict.fromkeys(overlaps, False),
        "num_procs": layout.devices,
        "tensor_par": layout.tp,
        "pipeline_par": layout.pp,
        "data_par": layout.dp,
        "tensor_par_net": int(layout.tp > 8),
        "pipeline_par_net": outside,
        "data_par_net": outside,
        "batch_size": job.global_batch,
        "microbatch_size": job.micro_batch,
        "datatype": "float16",
        "fused_activation": True,
        "attention_type": "multihead",
        "activation_recompute": _RECOMPUTE[job.recompute or "none"],
        "pipeline_interleaving": layout.chunks,
        "optimizer_sharding": layout.zero == 1 and layout.dp > 1,
        "tensor_par_comm_type": "rs_ag" if layout.sequence_parallel else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": layout.sequence_parallel and job.recompute != "none",
        "training": True,
    }


def calculon_s(folder: Path, run: PublishedRun, found: Prediction) -> float:
    """Returns the seconds of a step that Calculon predicts."""
    llm = importlib.import_module("calculon.llm.llm").Llm
    system_class = importlib.import_module("calculon.system").System
    model = run.model
    shape = {
        "hidden": model.hidden,
        "feedforward": model.ffn,
        "seq_size": run.job.seq,
        "attn_heads": model.heads,
        "attn_size": model.head_dim,
        "num_blocks": model.layers,
    }
    system = system_class(json.loads((folder / "systems" / "a100_80g.json").read_text()))
    predicted = llm(llm.Application(shape), logging.getLogger("calculon"))
    predicted.compile(system, llm.Execution.from_json(execution(found)))
    predicted.run(system)
    return float(predicted.get_total_time())


def main(folder: Path) -> None:
    """Prints the mean absolute errors of each source."""
    sys.path.insert(0, str(folder))
    sys.modules.setdefault("pandas", ModuleType("pandas"))  # only its searches use pandas
    runs = [run for run in published_runs() if both_can(run)]
    for source, members in grouped(runs, lambda run: run.source):
        ratios = []
        for run in members:
            found = predict_run(run)
            seconds = calculon_s(folder, run, found), found.step_s
            ratios.append([each / run.measured_s - 1 for each in seconds])
        theirs, ours = np.mean(np.abs(ratios), axis=0)
        print(f"{source}: {len(members)} runs, Calculon {theirs:.1%}, planner (fitted) {ours:.1%}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
