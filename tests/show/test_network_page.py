"""Tests of a network's page in headless Chromium: clicks highlight the routes of messages."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from unisono import topology
from unisono.show import network

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.program("chromium", "chromium-browser")

CLICKS = """<script>
const errors = [];
addEventListener("securitypolicyviolation", (event) => errors.push(event.blockedURI));
const at = (node) => document.querySelector(`.node[data-node="${node}"]`);
const lit = () => [...document.querySelectorAll(".cable.lit")].map((c) => c.dataset.ends).join(",");
const seen = [];
at(1).dispatchEvent(new PointerEvent("pointerenter"));
seen.push(lit());
at(1).dispatchEvent(new PointerEvent("pointerleave"));
seen.push(lit());
for (const node of [0, 2]) at(node).dispatchEvent(new MouseEvent("click", { bubbles: true }));
seen.push(lit(), document.getElementById("says").textContent);
document.querySelector("#network svg").dispatchEvent(new MouseEvent("click"));
seen.push(lit(), errors.length);
document.body.dataset.seen = seen.join("|");
</script></body>"""


def test_clicks_highlight_the_route(tmp_path: Path) -> None:
    page = tmp_path / "ring.html"
    page.write_text(network.network_html(topology.ring(5)).replace("</body>", CLICKS))
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *options, page.as_uri()], capture_output=True, text=True, check=True, timeout=110
    )
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found is not None
    assert found[1] == "0 1,1 2||0 1,1 2|From rank 0 to rank 2: 2 links.||0"
