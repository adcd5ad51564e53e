"""Skips the scenarios of this folder if ranks cannot connect across hosts yet."""

from __future__ import annotations

import pytest

ACROSS_HOSTS = True

needs_hosts = pytest.mark.skipif(not ACROSS_HOSTS, reason="ranks do not meet across hosts yet")
