"""SVG elements of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from unisono.show.palette import luminance_of
from unisono.show.placement import Arrow, number

INK, SOFT, FAINT, PAPER = "#1a1d23", "#5b6270", "#e9ebef", "#ffffff"
FONTS = "Inter, system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"


def draw_document(
    size: tuple[float, float], title: str, parts: Sequence[str], *, summary: str = ""
) -> str:
    """Returns an SVG document of this width and height, with the parts on white paper."""
    width, height = map(number, size)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="{FONTS}" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            *([f"<desc>{escape(summary)}</desc>"] if summary else []),
            f'<rect width="100%" height="100%" fill="{PAPER}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def draw_arrow(arrow: Arrow, color: str, reduce: bool, *, width: float, opacity: float) -> str:
    """Draws an arrow. A reduction is solid with a filled head; a copy is dashed with an open
    head."""
    x, y, angle = arrow.tip
    size = number(2.2 + 1.6 * width)
    half = number(1.2 + 0.9 * width)
    dash = "" if reduce else f' stroke-dasharray="{number(2.4 * width)} {number(1.5 * width)}"'
    head = (
        f'<path d="M0 0L-{size} {half}L-{size} -{half}Z" fill="{color}" stroke="none" '
        if reduce
        else f'<path d="M-{size} {half}L0 0L-{size} -{half}" '
    )
    return (
        f'<g fill="none" stroke="{color}" stroke-width="{number(width)}" opacity="{opacity}">'
        f'<path d="{arrow.path}"{dash}/>'
        f'{head}transform="translate({number(x)} {number(y)}) rotate({number(angle)})"/></g>'
    )


def draw_badge(arrow: Arrow, text: str, color: str) -> str:
    x, y = arrow.label
    wide = max(13.0, 5.4 * len(text) + 5)
    ink = INK if luminance_of(color) > 0.2 else PAPER
    return (
        f'<rect x="{number(x - wide / 2)}" y="{number(y - 6.5)}" width="{number(wide)}" '
        f'height="13" rx="6.5" fill="{color}" stroke="{PAPER}" stroke-width="1"/>'
        + draw_text(x, y + 3.2, text, size=9, anchor="middle", fill=ink, weight=650)
    )


def draw_text(
    x: float,
    y: float,
    text: str,
    *,
    size: float,
    fill: str = "",
    weight: int = 0,
    anchor: str = "",
) -> str:
    extra = f' fill="{fill}"' if fill else ""
    extra += f' font-weight="{weight}"' if weight else ""
    extra += f' text-anchor="{anchor}"' if anchor else ""
    return (
        f'<text x="{number(x)}" y="{number(y)}" font-size="{number(size)}"{extra}>'
        f"{escape(text)}</text>"
    )


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the first and last number of each run of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for value in numbers:
        if found and value == found[-1][1] + 1:
            found[-1] = found[-1][0], value
        else:
            found.append((value, value))
    return found
