"""The table of contents of the site: the pages of each language, in sections."""

from __future__ import annotations

from typing import Final

Section = tuple[str, list[str]]

LANGUAGES: Final = ("en", "zh")

START: Final = {"en": "docs/index.md", "zh": "docs/zh/index.md"}
"""The start page of each language. It becomes `index.md` of the language's pages."""

COURSE: Final = {"en": "Course", "zh": "课程"}
"""The heading of the section of labs, which is the first section."""

SECTIONS: Final[dict[str, list[Section]]] = {
    "en": [
        (
            "How to",
            [
                "docs/guides/torch.md",
                "docs/guides/gloo.md",
                "docs/guides/jax.md",
                "docs/guides/hosts.md",
                "docs/guides/tls.md",
                "docs/guides/failures.md",
                "docs/guides/tune.md",
                "docs/guides/algorithm.md",
                "docs/guides/plan.md",
            ],
        ),
        (
            "Users: train",
            [
                "README.md",
                "docs/torch.md",
                "docs/frameworks.md",
                "docs/gpu.md",
                "docs/jax.md",
                "docs/data_parallel.md",
                "docs/parallel.md",
                "docs/parallel/steps.md",
                "docs/parallel/strategies.md",
                "docs/parallel/models.md",
                "docs/parallel/pipelines.md",
                "docs/parallel/optimizers.md",
                "docs/parallel/checkpoints.md",
                "docs/parallel/hosts.md",
                "docs/recommendation.md",
                "docs/parameter_server.md",
                "docs/weights.md",
                "docs/launchers.md",
                "docs/hosts.md",
                "docs/mpi.md",
                "docs/errors.md",
                "docs/environment.md",
            ],
        ),
        (
            "Developers: communicate",
            [
                "docs/collectives.md",
                "docs/point_to_point.md",
                "docs/algorithms.md",
                "docs/controller.md",
                "docs/reproducibility.md",
                "docs/divisible.md",
                "docs/c.md",
            ],
        ),
        (
            "Systems engineers: predict",
            [
                "docs/simulator.md",
                "docs/planner.md",
                "docs/planner-recommendation.md",
                "docs/timeline.md",
                "docs/lab.md",
            ],
        ),
        (
            "Results",
            [
                "benchmarks/RESULTS.md",
                "benchmarks/results/hosts.md",
                "benchmarks/results/messages.md",
                "benchmarks/results/shared-arrays.md",
                "benchmarks/results/peers.md",
                "benchmarks/results/interfaces.md",
                "benchmarks/results/training.md",
                "benchmarks/results/controller.md",
                "benchmarks/results/algorithms.md",
                "benchmarks/results/simulator.md",
                "benchmarks/RESULTS-intel.md",
                "benchmarks/results/intel/training.md",
                "benchmarks/README.md",
            ],
        ),
        (
            "Internals",
            [
                "ARCHITECTURE.md",
                "docs/internals/schedules.md",
                "docs/internals/execution.md",
                "docs/internals/memory.md",
                "docs/internals/p2p.md",
                "docs/internals/hosts.md",
                "docs/internals/failures.md",
                "docs/internals/selection.md",
                "docs/internals/site.md",
                "docs/internals/rejected.md",
            ],
        ),
        (
            "Project",
            ["docs/glossary.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"],
        ),
    ],
    "zh": [("文档", ["docs/zh/README.md", "docs/zh/errors.md", "docs/zh/glossary.md"])],
}
