"""The environment of ranks that a program starts on other hosts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from unisono.config.environment import VARIABLES

_OF_EACH_RANK = frozenset((
    "UNISONO_RANK", "UNISONO_SIZE", "UNISONO_RENDEZVOUS", "UNISONO_JOB_SECRET",
    "UNISONO_JOB_SECRET_FILE", "UNISONO_HOST_ID",
))  # fmt: skip
"""Variables that a program does not hand over to its ranks."""


def own_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables of this program that apply to the ranks that it starts.

    >>> own_variables({"UNISONO_STREAMS": "2", "UNISONO_RANK": "3", "HOME": "/"})
    {'UNISONO_STREAMS': '2'}
    """
    names = VARIABLES - _OF_EACH_RANK
    return {name: value for name, value in environ.items() if name in names}


def adopt(
    variables: Mapping[str, str], secret: str, environ: os._Environ[str] = os.environ
) -> None:
    """Sets the program's variables that this process does not set, and the job's secret."""
    for name, value in variables.items():
        environ.setdefault(name, value)
    environ.pop("UNISONO_JOB_SECRET_FILE", None)
    environ["UNISONO_JOB_SECRET"] = secret


def of_child(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns this process's environment for a new Python that imports the same modules."""
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
