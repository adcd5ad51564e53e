"""The Chinese pages: each English heading, term and error has its Chinese counterpart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unisono import errors

ROOT = Path(__file__).parents[2]
ZH = ROOT / "docs/zh"
PAIRS = {
    "README.md": "README.md",
    "docs/errors.md": "errors.md",
    "docs/glossary.md": "glossary.md",
}
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def headings(text: str) -> list[str]:
    """Returns the headings of a page, without the lines of its code blocks."""
    return re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.MULTILINE)


def translated(text: str) -> list[str]:
    """Returns the English headings that the comments of a Chinese page name. Each comment must
    follow a heading.
    """
    plain = re.sub(r"```.*?```", "", text, flags=re.S)
    found = re.findall(r"^#+ (.+)\n<!-- (?:en: (.+)|zh only) -->$", plain, re.MULTILINE)
    assert len(found) == len(headings(text)), "a heading without its comment <!-- en: ... -->"
    return [english for _, english in found if english]


def rows(text: str) -> list[list[str]]:
    """Returns the cells of all tables of a page, without the heads."""
    lines = re.sub(r"^\|.*\n\|[-|]+\n", "", text, flags=re.MULTILINE).splitlines()
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]


@pytest.mark.parametrize(("english", "chinese"), PAIRS.items())
def test_each_english_heading_has_a_chinese_heading(english: str, chinese: str) -> None:
    assert translated((ZH / chinese).read_text()) == headings((ROOT / english).read_text())


def test_the_glossary_has_the_same_terms_and_counterparts() -> None:
    english = rows((ROOT / "docs/glossary.md").read_text())
    chinese = rows((ZH / "glossary.md").read_text())[: len(english)]
    assert [row[1] for row in chinese] == [row[0] for row in english]
    for (_, _, elsewhere), (word, _, meaning, other) in zip(english, chinese, strict=True):
        assert CHINESE.search(word) and CHINESE.search(meaning)
        assert re.findall(r"`\w+`", other) == re.findall(r"`\w+`", elsewhere)


def test_both_error_tables_name_every_error() -> None:
    classes = {
        name
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, errors.UnisonoError)
    }
    for page in (ROOT / "docs/errors.md", ZH / "errors.md"):
        in_tables = {row[0].strip("`") for row in rows(page.read_text())}
        assert in_tables == classes - {"UnisonoError", "CommunicationError"}, page


def code(text: str, kind: str) -> list[str]:
    """Returns the lines of a page's blocks of one kind, without comments and empty lines."""
    lines = "".join(re.findall(rf"^```{kind}\n(.*?)^```", text, re.S | re.M)).splitlines()
    plain = (re.sub(r"(^|\s+)# .*", "", line) for line in lines)
    return [line for line in plain if line]


def test_the_chinese_readme_has_the_english_code_and_links() -> None:
    """The code of the English page is executed, so the Chinese page needs no run of its own."""
    english, chinese = (ROOT / "README.md").read_text(), (ZH / "README.md").read_text()
    assert code(chinese, "python") == code(english, "python") != []
    assert code(chinese, "sh") == code(english, "sh") != []
    starts = ((folder / "index.md").read_text() for folder in (ROOT / "docs", ZH))
    assert code(next(starts), "sh") == code(next(starts), "sh") != []
    for pattern in (r"`unisono \w+`", r"`\w+Error`"):
        assert set(re.findall(pattern, english)) <= set(re.findall(pattern, chinese)), pattern


@pytest.mark.parametrize("start", ["docs/index.md", "docs/zh/index.md"])
def test_the_start_page_quotes_the_results(start: str) -> None:
    """The numbers of the start page are those of the targets in the results."""
    results = (ROOT / "benchmarks/RESULTS.md").read_text()
    text = (ROOT / start).read_text()
    for target in (
        "torch: gloo's time",
        "torch: the same",
        "native: openmpi's",
        "native: the same",
    ):
        row = next(r for r in rows(results) if r[0].startswith(target))
        ratio, _, rest = row[2].partition(" (")
        assert re.search(rf"(?<![\d.]){ratio}(?![\d.])", text), row
        for number in re.findall(r"n=(\d)|(\d+)M|^(\w+) ", rest):
            assert next(filter(None, number)) in text, row


@pytest.mark.parametrize("page", sorted(each.name for each in ZH.glob("*.md")))
def test_links_of_chinese_pages_lead_to_files(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)", (ZH / page).read_text()):
        assert (ZH / target).exists(), target
