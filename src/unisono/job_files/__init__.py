"""Jobs of other frameworks: their model, layout and workload, for the planner.

>>> import tempfile
>>> from pathlib import Path
>>> from unisono import job_files
>>> with tempfile.TemporaryDirectory() as folder:
...     path = Path(folder) / "job.sh"
...     _ = path.write_text("--tensor-model-parallel-size 8 --seq-length 4096 --my-flag 1")
...     job = job_files.read_job(path)
>>> job.layout_on(64).text(), job.unknown
('dp8 tp8', ('--my-flag',))

`read_job` reads scripts of Megatron-LM, options of recipes of Megatron-Bridge, and TOML files of
torchtitan. `job_settings.json` has the settings of these frameworks that the planner does not read.
"""

from unisono.job_files.job_file import read_job
from unisono.job_files.similar_job import SimilarJob

__all__ = ["SimilarJob", "read_job"]
