"""Tests of the SVG and HTML drawings as text; test_browser.py tests the page in a browser."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ET

import pytest

from unisono.algorithms import build, names
from unisono.errors import UnsupportedError
from unisono.show import MAX_RANKS, html, svg, view
from unisono.show.picture import PANELS, pick
from unisono.types import Op

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</script><img src=x onerror=alert(1)>&"


def titles(text: str) -> list[str]:
    """Returns the titles of the drawn panels, such as `start` and `round 0`."""
    spans = [t[0].text or "" for t in ET.fromstring(text).iter(f"{SVG}text") if len(t)]
    return [span for span in spans if span == "start" or span.startswith("round")]


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("ranks", [1, 2, 7, 16])
def test_every_algorithm_is_drawn_with_one_panel_per_round(op: Op, ranks: int) -> None:
    for name in names(op):
        schedule_view = view(build(op, name, ranks=ranks, root=ranks - 1))
        expected = ["start", *(f"round {round_.number}" for round_ in schedule_view.rounds)]
        found = titles(svg(schedule_view))
        assert found == expected if len(expected) <= PANELS else set(found) < set(expected)


def test_copies_are_dashed_and_reductions_are_not() -> None:
    reduce, copy = (
        svg(view(build("all_reduce" if both else "all_gather", "ring", ranks=4)))
        for both in (True, False)
    )
    panels = [text.split(">round ")[1:] for text in (reduce, copy)]
    assert all("stroke-dasharray" not in panel for panel in panels[0][:3])
    assert all(panel.count("stroke-dasharray") >= 4 for panel in panels[0][3:] + panels[1])


def test_a_picture_of_many_ranks_is_small_and_too_many_are_refused() -> None:
    for op, name in (("all_reduce", "direct"), ("all_reduce", "ring"), ("all_to_all", "pairwise")):
        assert len(svg(view(build(op, name, ranks=64)))) < 2_000_000
    many = view(build("broadcast", "direct", ranks=MAX_RANKS + 1))
    for draw in (svg, html):
        with pytest.raises(UnsupportedError, match="at most 128 ranks, got 129"):
            draw(many)


def test_pick_prefers_rounds_around_a_change_of_kind() -> None:
    assert pick(["reduce"] * 63 + ["copy"] * 63, 8) == [0, 1, 61, 62, 63, 64, 124, 125]
    assert pick(["copy"] * 5, 9) == [0, 1, 2, 3, 4]


def data_of(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="view">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_page_needs_no_network() -> None:
    page = html(view(build("all_reduce", "ring", ranks=8)))
    assert set(re.findall(r"https?://[^\s\"']+", page)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link|\ssrc=|@import|url\(", page)
    assert "default-src 'none'" in page


def test_names_from_a_file_cannot_become_markup() -> None:
    schedule = dataclasses.replace(build("all_reduce", "ring", ranks=2), algorithm=HOSTILE)
    schedule_view = view(schedule)
    page, picture = html(schedule_view), svg(schedule_view)
    assert HOSTILE not in page and "<img" not in page
    assert HOSTILE in str(data_of(page)["title"])
    assert HOSTILE in "".join(ET.fromstring(picture).itertext())


def test_the_page_data_describe_what_the_ranks_hold() -> None:
    """Tests that the page's data give the contributions that each rank holds after each round. As
    on the page, later writes replace earlier writes.
    """
    found = data_of(html(view(build("all_reduce", "recursive_doubling", ranks=8))))
    state = {(rank, location): mask for rank, location, _, mask, _ in found["start"]}  # type: ignore[attr-defined]
    for k, round_ in enumerate(found["rounds"], start=1):  # type: ignore[arg-type,var-annotated]
        state |= {(rank, location): mask for rank, location, _, mask, _ in round_["writes"]}
        for rank in range(8):
            group = rank >> k << k
            mask = int(found["masks"][state[rank, 0]], 16)  # type: ignore[index]
            assert mask == sum(1 << r for r in range(group, group + (1 << k)))
