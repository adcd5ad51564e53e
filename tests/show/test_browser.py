"""Tests of the schedule page in headless Chromium. The tests step through every round and compare
the page with closed forms of the algorithms, not with our replay.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest

from unisono.algorithms import build
from unisono.show import html, view

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.program("chromium", "chromium-browser")

Json = Any

SEEN = """
const seen = () => ({
  round: document.body.dataset.round,
  says: document.getElementById("says").textContent,
  held: [...document.querySelectorAll("#holdings tbody tr")].map((row) =>
    [...row.querySelectorAll("td")].map((cell) => cell.dataset.ranks ?? "")),
  finished: document.querySelectorAll("#holdings td.finished").length,
  arrows: [...document.querySelectorAll("#stage .arrow")].map((a) => a.dataset.ranks).sort(),
  dashed: document.querySelectorAll("#stage .arrow path[stroke-dasharray]").length,
  carried: [...document.querySelectorAll("#traffic td")].filter((c) => c.textContent)
    .map((c) => `${c.dataset.link}: ${c.textContent}`),
  unnamed: [...document.querySelectorAll("button, input, svg[role]")]
    .filter((e) => !(e.ariaLabel || e.textContent || e.getAttribute("aria-labelledby"))).length,
  tooWide: document.documentElement.scrollWidth > innerWidth,
});
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("securitypolicyviolation", (event) => errors.push(event.blockedURI));
const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
"""
WALK = """
const slider = document.getElementById("slider");
const walk = [seen()];
for (let step = 1; step <= Number(slider.max); step++) {
  slider.value = step;
  slider.dispatchEvent(new Event("input"));
  walk.push(seen());
}
press("ArrowLeft");
const back = seen();
press("Home");
parent.postMessage({ name: NAME, walk, back, home: seen(), errors }, "*");
"""
PLAY = """
const opened = seen();
const places = new Set();
press("Home");
document.getElementById("speed").value = "4";
press(" ");
const watch = () => {
  for (const packet of document.querySelectorAll("#stage .packet")) {
    places.add(packet.getAttribute("transform"));
  }
  if (document.getElementById("play").textContent === "Pause") requestAnimationFrame(watch);
  else parent.postMessage({ name: NAME, opened, end: seen(), places: places.size, errors }, "*");
};
watch();
"""
HARNESS = """<!doctype html><script>
const all = {};
addEventListener("message", ({ data }) => {
  all[data.name] = data;
  if (Object.keys(all).length === COUNT) {
    fetch("report", { method: "POST", body: JSON.stringify(all) });
  }
});
</script>"""
CASES = {
    "ring": ("all_reduce", "ring", 5),
    "direct": ("all_reduce", "direct", 4),
    "doubling": ("all_reduce", "recursive_doubling", 8),
    "tree": ("broadcast", "binomial_tree", 8),
    "pairwise": ("all_to_all", "pairwise", 4),
    "wide": ("all_to_all", "pairwise", 16),
}
WIDTHS = {"ring": 360, "direct": 1024, "doubling": 390, "tree": 1024, "pairwise": 360, "wide": 390}


def page(case: tuple[str, str, int], script: str) -> str:
    """Returns a page with an added script at its end."""
    op, name, ranks = case
    text = html(view(build(op, name, ranks=ranks), nbytes=ranks << 20))
    text = text.replace("<script>", f"<script>{SEEN}</script><script>", 1)
    return text.replace("</body>", f"<script>{script}</script></body>")


def visit(folder: Path) -> Json:
    """Opens the folder's harness.html in the browser, and returns the page's report."""
    reports: Queue[bytes] = Queue()

    class Handler(SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            reports.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    assert CHROMIUM is not None
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        browser = subprocess.Popen(
            [
                *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *(f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000"),
                f"http://127.0.0.1:{server.server_port}/harness.html",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return json.loads(reports.get(timeout=90))
        finally:
            browser.terminate()
            browser.wait(10)
            server.shutdown()


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Json]:
    """Returns the reports of all cases, which run in one browser, each in a frame with its own
    width.
    """
    folder = tmp_path_factory.mktemp("pages")
    (folder / "play.html").write_text(page(("all_reduce", "ring", 3), named(PLAY, "play")))
    frames = '<iframe src="play.html#round=0" width="1024" height="600"></iframe>'
    for name, case in CASES.items():
        (folder / f"{name}.html").write_text(page(case, named(WALK, name)))
        frames += f'<iframe src="{name}.html" width="{WIDTHS[name]}" height="900"></iframe>'
    harness = HARNESS.replace("COUNT", str(len(CASES) + 1))
    (folder / "harness.html").write_text(harness + frames)
    found: dict[str, Json] = visit(folder)
    return found


def named(script: str, name: str) -> str:
    return script.replace("NAME", json.dumps(name))


def spell(ranks: set[int]) -> str:
    return " ".join(map(str, sorted(ranks)))


def test_ring(walks: dict[str, Json]) -> None:
    n, walk = 5, walks["ring"]["walk"]
    assert [seen["round"] for seen in walk] == ["start", *map(str, range(2 * (n - 1)))]
    for k, seen in enumerate(walk[1:]):
        assert seen["arrows"] == sorted(f"{rank} {(rank + 1) % n}" for rank in range(n))
        assert seen["dashed"] == (n if k >= n - 1 else 0), "copies are dashed"
        for rank in range(n):
            chunk = (rank - 2 - k) % n if k < n - 1 else (rank - 1 - (k - n + 1)) % n
            behind = {(rank - i) % n for i in range(min(k + 2, n))}
            assert seen["held"][rank][chunk] == spell(behind)
        links = sorted(f"{rank},{(rank + 1) % n}: {k + 1} MiB" for rank in range(n))
        assert sorted(seen["carried"]) == links, "so far"
    assert walk[-1]["finished"] == n * n


def test_direct(walks: dict[str, Json]) -> None:
    n, (start, reduced, copied) = 4, walks["direct"]["walk"]
    assert start["held"] == [[str(rank)] * n for rank in range(n)]
    pairs = sorted(f"{a} {b}" for a in range(n) for b in range(n) if a != b)
    assert reduced["arrows"] == copied["arrows"] == pairs
    everyone = spell(set(range(n)))
    for rank in range(n):
        owned = [everyone if chunk == rank else str(rank) for chunk in range(n)]
        assert reduced["held"][rank] == owned
        assert copied["held"][rank] == [everyone] * n


def test_recursive_doubling(walks: dict[str, Json]) -> None:
    walk = walks["doubling"]["walk"]
    assert len(walk) == 4
    for k, seen in enumerate(walk):
        for rank in range(8):
            group = rank >> k << k
            assert seen["held"][rank] == [spell(set(range(group, group + (1 << k))))]
    assert walk[3]["arrows"] == sorted(f"{rank} {rank ^ 4}" for rank in range(8))


def test_binomial_broadcast(walks: dict[str, Json]) -> None:
    for k, seen in enumerate(walks["tree"]["walk"]):
        holders = set(range(0, 8, 8 >> k))
        assert seen["held"] == [["0"] if rank in holders else [""] for rank in range(8)]
        assert seen["finished"] == 1 << k


@pytest.mark.parametrize(("name", "n"), [("pairwise", 4), ("wide", 16)])
def test_pairwise_all_to_all(walks: dict[str, Json], name: str, n: int) -> None:
    for k, seen in enumerate(walks[name]["walk"]):
        for rank in range(n):
            sources = {(rank - i) % n for i in range(k + 1)}
            assert seen["held"][rank] == [str(s) if s in sources else "" for s in range(n)]


def test_stepping_back_restores_the_earlier_round(walks: dict[str, Json]) -> None:
    for walked in (walks[name] for name in CASES):
        assert walked["back"] == walked["walk"][-2]
        assert walked["home"] == walked["walk"][0]


def test_every_page_fits_its_width_without_errors(walks: dict[str, Json]) -> None:
    for name in CASES:
        walked = walks[name]
        assert walked["errors"] == [], name
        for seen in walked["walk"]:
            assert not seen["tooWide"], f"{name} is wider than {WIDTHS[name]} px"
            assert seen["unnamed"] == 0


def test_play_moves_chunks_and_stops_after_the_last_round(walks: dict[str, Json]) -> None:
    replayed = walks["play"]
    assert replayed["errors"] == []
    assert replayed["opened"]["round"] == "0", "the address selects a round"
    assert replayed["opened"]["held"] == [["0", "0 2", "0"], ["1", "1", "0 1"], ["1 2", "2", "2"]]
    assert replayed["end"]["round"] == "3"
    assert replayed["end"]["finished"] == 9
    assert replayed["places"] > 3 * 4, "packets also have positions on the path"
