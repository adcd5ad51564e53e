"""The benchmark. All contestants alternate in one run, and every rank verifies its results.

A contestant is a library, or Unisono with one algorithm, and runs as a group of rank processes
(`contestant_ranks`, `contestant_rank`). The processes run until the end of the benchmark, and sleep
in the kernel while other contestants are measured. `runner` alternates between contestants.
`results` has the measurements; `report` prints them and `plot` draws them. Ranks run on this
machine, or on the hosts of a `lab` (`cluster`).
"""

from typing import TYPE_CHECKING

from unisono.lazy_names import lazy_names

if TYPE_CHECKING:
    from unisono.bench.cases import OPERATIONS, Case
    from unisono.bench.cluster import Cluster
    from unisono.bench.contestants import MEMORY, NETWORK, OURS, Contestant
    from unisono.bench.explain_choice import explain_choice
    from unisono.bench.journal import Journal
    from unisono.bench.lab import Lab
    from unisono.bench.machine_facts import describe_machine
    from unisono.bench.plot import save_plot
    from unisono.bench.predict import read_models, with_predictions
    from unisono.bench.prove import judge, render_verdicts, run_proved
    from unisono.bench.report import render_report
    from unisono.bench.runner import Pace, run_benchmark
    from unisono.bench.selfcheck import render_checks, require_device, run_checks
    from unisono.bench.sizes import parse_size, parse_sizes
    from unisono.bench.tuner import TUNABLE, TuneRequest, tune

__getattr__ = lazy_names(
    __name__,
    {
        "unisono.bench.cases": ["OPERATIONS", "Case"],
        "unisono.bench.cluster": ["Cluster"],
        "unisono.bench.contestants": ["MEMORY", "NETWORK", "OURS", "Contestant"],
        "unisono.bench.explain_choice": ["explain_choice"],
        "unisono.bench.journal": ["Journal"],
        "unisono.bench.lab": ["Lab"],
        "unisono.bench.machine_facts": ["describe_machine"],
        "unisono.bench.plot": ["save_plot"],
        "unisono.bench.predict": ["read_models", "with_predictions"],
        "unisono.bench.prove": ["judge", "render_verdicts", "run_proved"],
        "unisono.bench.report": ["render_report"],
        "unisono.bench.runner": ["Pace", "run_benchmark"],
        "unisono.bench.selfcheck": ["render_checks", "require_device", "run_checks"],
        "unisono.bench.sizes": ["parse_size", "parse_sizes"],
        "unisono.bench.tuner": ["TUNABLE", "TuneRequest", "tune"],
    },
)

__all__ = [
    "MEMORY",
    "NETWORK",
    "OPERATIONS",
    "OURS",
    "TUNABLE",
    "Case",
    "Cluster",
    "Contestant",
    "Journal",
    "Lab",
    "Pace",
    "TuneRequest",
    "describe_machine",
    "explain_choice",
    "judge",
    "parse_size",
    "parse_sizes",
    "read_models",
    "render_checks",
    "render_report",
    "render_verdicts",
    "require_device",
    "run_benchmark",
    "run_checks",
    "run_proved",
    "save_plot",
    "tune",
    "with_predictions",
]
