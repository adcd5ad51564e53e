"""The check of the finished site's links: every address of this site exists, with its anchor."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The addresses and the anchors of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.update(filter(None, [values.get("id"), values.get("name")]))
        names = {"a": "href", "link": "href", "img": "src", "script": "src", "iframe": "src"}
        if address := values.get(names.get(tag, "")):
            self.addresses.append(address)


def broken(site: Path) -> list[str]:
    """Returns a line for each address that leads nowhere, and for each script, style or picture
    that another site would have to send.
    """
    pages = {path.resolve(): _Page(path) for path in sorted(site.rglob("*.html"))}
    lines = []
    for path, page in pages.items():
        for address in page.addresses:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc or address == "#":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            missing = not target.exists()
            anchor = unquote(parts.fragment)
            if missing or (anchor and target in pages and anchor not in pages[target].anchors):
                lines.append(f"{path.relative_to(site.resolve())}: {address}")
    return lines
