"""Fixtures of tests of communicators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pretended_hosts import World

LAYOUTS = ([0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 1, 1])


@pytest.fixture(scope="module")
def worlds() -> Iterator[list[World]]:
    """Returns communicators of ranks on several hosts, one world for each layout."""
    made = [World(layout, timeout_s=40.0) for layout in LAYOUTS]
    yield made
    for world in made:
        world.close()
