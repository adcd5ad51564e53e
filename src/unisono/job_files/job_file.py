"""Reads a job file of any known framework."""

from __future__ import annotations

from pathlib import Path

from unisono.job_files.megatron_flags import read_megatron
from unisono.job_files.similar_job import SimilarJob
from unisono.job_files.torchtitan_options import read_torchtitan
from unisono.text_files import reading


def read_job(path: str | Path) -> SimilarJob:
    """Returns the job of a file: TOML of torchtitan, or any text with flags of Megatron-LM or
    options of Megatron-Bridge. Raises ValueError for a file without any of them.
    """
    with reading(Path(path)) as text:
        found = (read_torchtitan if Path(path).suffix == ".toml" else read_megatron)(text)
        axes = found.layout.keys() - {"zero", "sequence_parallel"}
        sizes = found.workload.keys() & {"seq", "global_batch", "micro_batch"}
        if found.model is None and not axes and not sizes and found.missing.keys() <= {"--model"}:
            raise ValueError(
                "no job: expected flags such as --tensor-model-parallel-size of Megatron-LM, "
                "options of a recipe of Megatron-Bridge, or the TOML of torchtitan (.toml)"
            )
        return found
