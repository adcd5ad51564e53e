"""Tests of the built site in headless Chromium, at the width of a phone: no error in a console, no
request to another server, no heavy page, and a search that finds words in both languages.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs/zh/glossary.md").read_text()
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PAGE_BYTES, PLAYER_BYTES = 300_000, 1_000_000
SEARCHES = {
    "search.html?q=halving+doubling": "algorithms.html",
    "zh/search.html?q=集合通信库": "/zh/",
    "zh/search.html?q=流水并行": "zh/course/",
}
TERMS = [
    term
    for row in re.findall(r"^\| ([^|]*[\u4e00-\u9fff][^|]*) \|", GLOSSARY, re.MULTILINE)
    for term in re.split("[、，；：（）()]", row)
    if term and row != "中文"
]
BROWSER_S, BUILD_S = 300, 900

pytestmark = [
    pytest.mark.optional,
    pytest.mark.program("chromium", "chromium-browser"),
    pytest.mark.timeout(BROWSER_S + BUILD_S),
]

WATCH = b"""<script>
window.wrong = [];
addEventListener("error", (e) => wrong.push(e.message || e.target.src || e.target.href), true);
addEventListener("unhandledrejection", (e) => wrong.push(String(e.reason)));
addEventListener("securitypolicyviolation", (e) => wrong.push(e.blockedURI));
for (const kind of ["error", "warn"]) {
  const print = console[kind];
  console[kind] = (...words) => { wrong.push(words.join(" ")); print(...words); };
}
</script>"""
HARNESS = """<!doctype html><body><script>
const visit = (address, until) => new Promise((done) => {
  const frame = document.createElement("iframe");
  frame.width = 390; frame.height = 800; frame.src = address;
  frame.onload = async () => {
    const inside = frame.contentWindow;
    const end = performance.now() + (until ? 10000 : 0);
    const links = () => [...inside.document.querySelectorAll("#search a")].map((a) => a.href);
    do await new Promise((next) => setTimeout(next, 30));
    while (performance.now() < end && !links().length);
    if (until) await new Promise((next) => setTimeout(next, 2000));  // for the other results
    const loads = inside.performance.getEntriesByType("resource")
      .concat(inside.performance.getEntriesByType("navigation"));
    const missed = [];
    if (address === "zh/search.html") {
      const engine = new URL("../pagefind/pagefind.js", inside.location.href).href;
      const pagefind = await inside.eval(`import("${engine}")`);
      for (const term of TERMS)
        if (!(await pagefind.search(inside.eval("query")(term))).results.length) missed.push(term);
    }
    done({
      missed, wrong: inside.wrong, links: links(), title: inside.document.title,
      bytes: loads.reduce((sum, load) => sum + load.decodedBodySize, 0),
      foreign: loads.map((load) => load.name).filter((name) => !name.startsWith(location.origin)),
      players: inside.document.querySelectorAll("iframe").length,
      width: inside.document.documentElement.scrollWidth,
    });
    frame.remove();
  };
  document.body.append(frame);
});
const all = {};
const walk = async (addresses) => {
  for (const address of addresses) all[address] = await visit(address, address.includes("?q="));
};
const lanes = [0, 1, 2].map((lane) => walk(ADDRESSES.filter((_, i) => i % 3 === lane)));
Promise.all(lanes).then(() => fetch("report", { method: "POST", body: JSON.stringify(all) }));
</script>"""


class Server(SimpleHTTPRequestHandler):
    """Serves the site with a script in each page that collects errors. Receives the report."""

    reports: Queue[bytes] = Queue()
    harness = ""

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if self.path == "/harness.html":
            self._send(self.harness.encode())
        elif path.suffix == ".html" and path.exists():
            self._send(path.read_bytes().replace(b"<head>", b"<head>" + WATCH, 1))
        else:
            super().do_GET()

    def do_POST(self) -> None:
        self.reports.put(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()

    def _send(self, text: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in ("sphinx", "furo", "myst_parser", "pagefind", "mermaidx", "marimo"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, str(ROOT / "docs/site/build.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def visits(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Returns the report of each page and search."""
    pages = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html"))]
    frames = [page for page in pages if "/players/" not in f"/{page}"]
    visited, terms = json.dumps([*frames, *SEARCHES]), json.dumps(TERMS)
    Server.harness = HARNESS.replace("ADDRESSES", visited).replace("TERMS", terms)
    profile = tmp_path_factory.mktemp("profile")
    assert CHROMIUM is not None
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/harness.html"
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run")
        browser = subprocess.Popen(
            [CHROMIUM, *options, f"--user-data-dir={profile}", "--window-size=1400,1000", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield json.loads(Server.reports.get(timeout=BROWSER_S))
        finally:
            browser.terminate()
            browser.wait(10)
            server.shutdown()


def test_no_page_has_an_error_in_the_console(visits: dict[str, Any]) -> None:
    assert {page: seen["wrong"] for page, seen in visits.items() if seen["wrong"]} == {}


def test_no_page_asks_another_server(visits: dict[str, Any]) -> None:
    assert {page: seen["foreign"] for page, seen in visits.items() if seen["foreign"]} == {}


def test_no_page_is_heavy(visits: dict[str, Any]) -> None:
    heavy = {
        page: seen["bytes"]
        for page, seen in visits.items()
        if seen["bytes"] > (PLAYER_BYTES if seen["players"] else PAGE_BYTES) and "?" not in page
    }
    assert heavy == {}


def test_no_page_is_wider_than_a_phone(visits: dict[str, Any]) -> None:
    assert {page: seen["width"] for page, seen in visits.items() if seen["width"] > 390} == {}


def test_both_languages_find_words(visits: dict[str, Any]) -> None:
    for search, wanted in SEARCHES.items():
        links = visits[search]["links"]
        assert any(wanted in link for link in links), (search, links)


def test_the_search_finds_each_term_of_the_chinese_glossary(visits: dict[str, Any]) -> None:
    assert len(TERMS) > 90
    assert visits["zh/search.html"]["missed"] == []


def test_each_page_has_a_title_of_its_own_language(visits: dict[str, Any]) -> None:
    assert visits["index.html"]["title"] and visits["zh/index.html"]["title"]
    assert len(visits) > 100
