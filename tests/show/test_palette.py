from __future__ import annotations

from itertools import pairwise

import pytest

from unisono.show.palette import luminance_of, palette

DARK = "#1a1e26"  # the color --raised of page.css, the lightest dark background


def contrast(one: str, other: str) -> float:
    """Returns the contrast by WCAG 2.2: (lighter + 0.05) / (darker + 0.05)."""
    low, high = sorted((luminance_of(one), luminance_of(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 16, 24, 128])
def test_colours_contrast_with_white_and_black(count: int) -> None:
    for color in palette(count):
        assert contrast(color, "#ffffff") >= 3
        assert contrast(color, DARK) >= 2.6
        assert contrast(color, "#000000") >= 3


@pytest.mark.parametrize("count", range(1, 20))
def test_colours_differ(count: int) -> None:
    assert len(set(palette(count))) == count


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_neighbouring_colours_differ_in_lightness(count: int) -> None:
    colors = palette(count)
    for one, other in pairwise(colors):
        assert contrast(one, other) > 1.4
