"""A heat map of link traffic over time: one row per link, one column per interval."""

from __future__ import annotations

from html import escape

import numpy as np
from numpy.typing import NDArray

from unisono.show.placement import number
from unisono.show.svg_elements import FAINT, SOFT, draw_document, draw_text
from unisono.show.unit_text import time_text
from unisono.simulator import Result

MAX_LINKS = 96
"""Maximum number of rows; the busiest links are drawn."""
_LEFT, _TOP, _WIDE = 190.0, 66.0, 760.0
_LOW, _HIGH = (0xF1, 0xF3, 0xF7), (0x9B, 0x1D, 0x20)


def link_heat_map(result: Result, title: str) -> str:
    """Returns an SVG of the links that carried data, ordered by id. Of more than 96 links, only the
    busiest are drawn. Raises `ValueError` for a result without `usage`, which needs `simulate(...,
    bins=64)`.

    >>> import unisono
    >>> from unisono import algorithms, topology
    >>> ring = algorithms.build("all_reduce", "ring", ranks=4)
    >>> link_heat_map(unisono.simulate(ring, topology.ring(4), 1e6, bins=32), "ring")[:4]
    '<svg'
    """
    if result.usage is None:
        raise ValueError("a heat map needs a simulation with bins, such as simulate(..., bins=64)")
    links = _busiest(result)
    full = _fullness(result, links)
    each = max(6.0, min(18.0, 640.0 / max(1, len(links))))
    high = _TOP + each * len(links) + 46
    wide = _LEFT + _WIDE + 40
    used = int((result.link_bytes > 0).sum())
    caption = (
        f"{len(links)} of {used} links that carried anything; utilisation over all time at the "
    )
    caption += f"right; {time_text(result.time_s)}"
    body = [_row(result, int(link), full[i], _TOP + i * each, each) for i, link in enumerate(links)]
    return draw_document(
        (wide, high),
        title,
        [
            draw_text(24, 30, title, size=17, weight=650),
            draw_text(24, 50, caption, size=11.5, fill=SOFT),
            *body,
            *_axis(result, _TOP + each * len(links)),
        ],
    )


def _busiest(result: Result) -> NDArray[np.int64]:
    order = np.argsort(-result.utilisation, kind="stable")[:MAX_LINKS]
    return np.sort(order[result.link_bytes[order] > 0])


def _fullness(result: Result, links: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the utilisation of each link in each interval, from 0 to 1."""
    usage = result.usage
    assert usage is not None, "link_heat_map checks this"
    bins = max(1, int(np.ceil(result.time_s / usage.width_s - 1e-9))) if usage.width_s else 1
    begun = np.arange(bins) * usage.width_s
    length = np.minimum(usage.width_s, result.time_s - begun)
    could = result.capacity_Bps[links, None] * np.maximum(length, 1e-30)
    return np.asarray(usage.link_bytes[links, :bins] / could, np.float64)


def _row(result: Result, link: int, full: NDArray[np.float64], y: float, high: float) -> str:
    step = _WIDE / len(full)
    cells = "".join(
        f'<rect x="{number(_LEFT + i * step)}" y="{number(y)}" width="{number(step + 0.3)}" '
        f'height="{number(high - 1)}" fill="{_color(value)}"/>'
        for i, value in enumerate(full.tolist())
        if value > 0.004
    )
    name, share = result.link_name(link), result.utilisation[link]
    size = min(11.0, high)
    back = (
        f'<rect x="{number(_LEFT)}" y="{number(y)}" width="{number(_WIDE)}" '
        f'height="{number(high - 1)}" fill="{FAINT}" opacity="0.5"/>'
    )
    return (
        f"<g><title>{escape(name)}: {share:.1%}</title>{back}{cells}"
        + draw_text(_LEFT - 8, y + high * 0.78, name, size=size, anchor="end", fill=SOFT)
        + draw_text(_LEFT + _WIDE + 6, y + high * 0.78, f"{share:.0%}", size=size, fill=SOFT)
        + "</g>"
    )


def _color(value: float) -> str:
    part = min(1.0, max(0.0, value))
    mixed = (round(low + (high - low) * part) for low, high in zip(_LOW, _HIGH, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _axis(result: Result, y: float) -> list[str]:
    return [
        draw_text(
            _LEFT + _WIDE * part,
            y + 20,
            time_text(result.time_s * part) if part else "0",
            size=11,
            anchor="middle",
            fill=SOFT,
        )
        for part in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
