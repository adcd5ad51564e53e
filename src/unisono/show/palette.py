"""Colours that are distinguishable on white and on black, also with colour vision deficiencies.

Hues are spread over the OKLCH wheel (Ottosson, "A perceptual color space for image processing",
2020). Neighbours also differ in lightness, which remains visible to readers who confuse the hues.
All colours have a contrast of at least 3:1 with white paper and a black screen (WCAG 2.2, 1.4.11).
"""

from __future__ import annotations

import math

_LUMINANCES = (0.265, 0.145)
"""Luminances of alternating light and dark colours. Below 0.30 the contrast with white is at least
3:1; above 0.125 the contrast with the dark background is at least 3:1."""
_MANY = 20
"""Number of colours from which neighbours are so similar that alternating lightness would look like
stripes."""
_CHROMA = 0.17
_FIRST_HUE_DEG = 255.0


def palette(count: int) -> list[str]:
    """Returns `count` colours, as `#rrggbb`.

    >>> palette(2)[0] != palette(2)[1]
    True
    """
    colors = []
    for i in range(count):
        luminance = _LUMINANCES[i % 2] if count < _MANY else sum(_LUMINANCES) / 2
        colors.append(_color(math.radians(_FIRST_HUE_DEG + 360 * i / count), luminance))
    return colors


def luminance_of(color: str) -> float:
    """Returns the relative luminance of a colour as defined by WCAG: 0 is black, 1 is white.

    >>> luminance_of("#ffffff")
    1.0
    """
    red, green, blue = (_linear(int(color[i : i + 2], 16) / 255) for i in (1, 3, 5))
    return round(0.2126 * red + 0.7152 * green + 0.0722 * blue, 6)


def _color(hue: float, luminance: float) -> str:
    """Returns the colour of a hue and a luminance, with the highest chroma that screens can
    display."""
    chroma = _CHROMA
    while True:
        low, high = 0.0, 1.0
        for _ in range(24):
            middle = (low + high) / 2
            rgb = _rgb(middle, chroma, hue)
            if 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2] < luminance:
                low = middle
            else:
                high = middle
        rgb = _rgb(low, chroma, hue)
        if all(-1e-3 <= value <= 1 for value in rgb):
            return "#" + "".join(f"{round(255 * _gamma(max(value, 0))):02x}" for value in rgb)
        chroma -= 0.01


def _rgb(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    """Converts OKLCH to linear sRGB, with Ottosson's matrices."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )


def _gamma(value: float) -> float:
    return 12.92 * value if value <= 0.0031308 else 1.055 * value ** (1 / 2.4) - 0.055


def _linear(value: float) -> float:
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
