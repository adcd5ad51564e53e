"""Skips of tests and checks that need another version of torch."""

from __future__ import annotations

import pytest
import torch

SKIPPED = "skipped: "
"""Begins the text of a rank that has skipped a check of its world."""


def needs_torch(version: str, reason: str) -> None:
    """Skips the test, or the check of a world, if torch is older than `version`."""
    if torch.__version__ < version:
        pytest.skip(f"torch {torch.__version__} is older than {version}: {reason}")
