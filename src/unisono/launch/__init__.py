"""Launch: `unisono.run` starts ranks as processes of this machine, or on the workers of an
executor.

>>> from concurrent.futures import ThreadPoolExecutor
>>> with ThreadPoolExecutor(2) as pool:
...     run(min, ranks=2, args=(3, 5), executor=pool)
[3, 3]
"""

from unisono.launch.executor import Executor, Future
from unisono.launch.run_ranks import run

__all__ = ["Executor", "Future", "run"]
