"""Skips of tests and checks that need another version of torch."""

from __future__ import annotations

import re

import pytest
import torch

from unisono.parallel import Layout

REFUSED = {"pp": "2.13", "schedule": "2.13", "zero": "2.13"}
"""Fields of a layout whose values unisono refuses on torch before a version (docs/torch.md)."""

SKIPPED = "skipped: "
"""Begins the text of a rank that has skipped a check of its world."""


def needs_torch(version: str, reason: str) -> None:
    """Skips the test, or the check of a world, if torch is older than `version`."""
    if torch.__version__ < version:
        pytest.skip(f"torch {torch.__version__} is older than {version}: {reason}")


def needs_layouts(*texts: str) -> None:
    """Skips a test, or a check of a world, of layouts that unisono refuses on this torch."""
    for layout in map(Layout.parse, texts):
        for field, version in REFUSED.items():
            if field != "schedule" and getattr(layout, field) > 1:
                needs_torch(version, f"unisono refuses {field} > 1")


def refusal(error: BaseException) -> str:
    """Returns the reason for which an error skips the test; "" if the error is a failure.

    Only the features of `REFUSED` may be refused, and only on a torch that is older than the
    version listed there. A test may have expected another error in the place of the refusal.
    """
    told = re.match(r"(\w+) = (\w+) needs torch ([\d.]+) or newer, found torch [^;]+", str(error))
    if not isinstance(error, ValueError) or told is None:
        return refusal(error.__context__) if error.__context__ else ""
    field, value, version = told.groups()
    is_listed = REFUSED.get(field) == version and torch.__version__ < version
    is_used = field == "schedule" or int(value) > 1
    return f"{field} = {value} needs torch {version} or newer" if is_listed and is_used else ""
