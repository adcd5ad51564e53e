"""Every lab of the course runs from top to bottom in both languages, and its claims hold. The tests
compare the results with closed forms and published numbers, not with the labs' texts.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unisono.course import LANGUAGES, chapters, lab

pytestmark = pytest.mark.optional

Defs = dict[str, Any]
RUN = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("lab", sys.argv[1])
lab = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lab)
outputs, values = lab.app.run()
texts = [each._markdown_text for each in outputs if hasattr(each, "_markdown_text")]
def plain(value):
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if isinstance(value, (int, float, str, type(None))) else None
print("\\n" + json.dumps({"values": plain(dict(values)), "texts": texts}))
"""


def parallelism(v: Defs) -> None:
    assert v["distance"]["without communication"] > 0.01
    assert v["distance"]["average_gradients"] == 0
    assert v["distance"]["average_gradients, to one process"] < 1e-12
    assert max(v["largest"].values()) < 1e-12


def primitives(v: Defs) -> None:
    sums = [60, 64, 68, 72]
    for rank, held in enumerate(v["held"]):
        assert held["all_reduce"] == sums and held["reduce_scatter"] == [sums[rank]]
        assert held["broadcast"] == [0, 1, 2, 3] and held["scatter"] == [rank]
        assert held["all_gather"] == [0, 10, 20, 30]
        assert held["all_to_all"] == [rank, 10 + rank, 20 + rank, 30 + rank]
    assert all(v["identities"].values()) and len(v["identities"]) == 5
    assert v["sent"]["reduce_scatter_all_gather"] == 2 * 7 / 8
    assert [kind for kind, _ in v["errors"]] == ["MismatchError"] * 4
    assert all("rank 3 called broadcast" in text for _, text in v["errors"])


def algorithms(v: Defs) -> None:
    assert v["counted"] == 2 * (8 - 1)
    lacks, twice, conflict = v["answers"]
    assert "lacks the contribution" in lacks and "twice" in twice and "in one round" in conflict
    assert v["refusals"] == ["ScheduleError"] * 4 and v["largest_difference"] < 1e-12
    assert min(v["small"], key=v["small"].get) == "recursive_doubling"
    assert v["large"]["ring"] == min(v["large"].values())


def topologies(v: Defs) -> None:
    of_16 = ("ring", "torus", "hypercube", "fat tree", "leaf-spine")
    times = [v["ring_ms"][name] for name in of_16]
    assert max(times) < 1.02 * min(times)
    assert v["exchange_ms"]["torus"] < v["exchange_ms"]["ring"] / 3
    assert abs(v["measured_speedup"] - 4) < 0.1
    assert abs(v["bound_ms"] - 2 * 15 / 16 * (64 << 20) / (4 * 12.5e9) * 1e3) < 0.01
    assert v["hottest"].count("switch") == 2


def overlap(v: Defs) -> None:
    assert (v["serial_ms"], v["overlapped_ms"]) == (577_152, 576_001)
    assert abs(v["fused_ms"] - (12 + 96 * 3250)) < 1e-6
    cases = v["predicted_and_measured_ms"]
    assert cases["serial"][2] == 96 and cases["fused by layer"][2] == 24
    assert all(measured >= 0.9 * predicted for predicted, measured, _ in cases.values())
    assert v["sums"] == [{"layer 1": 10.0, "layer 2": 12.0, "layer 3": 14.0}] * 2


def strategies(v: Defs) -> None:
    assert abs(v["bubbles"]["gpipe"] - 3 / 11) < 1e-9 and abs(v["bubbles"]["1f1b"] - 3 / 11) < 1e-9
    assert v["bubbles"]["interleaved"] < 3 / 11
    assert v["in_flight"]["gpipe"] == 8 and v["in_flight"]["1f1b"] == 4
    too_large = [name for name, held in v["memory_GB"].items() if held > v["capacity_GB"]]
    assert too_large == ["tp=8,dp=128"]
    assert v["step_s"]["tp=32,pp=8,dp=4"] > 1.2 * v["step_s"]["tp=8,pp=8,dp=16,zero=1"]


def walls(v: Defs) -> None:
    assert abs(v["weights_GiB"] - 745) < 1 and v["training_GiB"] == 4 * v["weights_GiB"]
    assert 0.8 < v["scale_factor"]["512"] < 0.95 < v["scale_factor"]["128"] <= 1.0
    assert abs(v["relative_error"]) < 0.2 and v["inside"]


CLAIMS: dict[str, Callable[[Defs], None]] = {
    each.__name__: each
    for each in (parallelism, primitives, algorithms, topologies, overlap, strategies, walls)
}


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", [chapter.name for chapter in chapters()])
def test_lab_runs_and_its_claims_hold(name: str, language: str) -> None:
    pytest.importorskip("marimo")
    command = [sys.executable, "-c", RUN, str(lab(name, language))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    CLAIMS[name](found["values"])
    assert len(found["texts"]) > 4


def cells(file: Path) -> list[tuple[bool, list[ast.stmt]]]:
    """Returns whether each cell of a lab is hidden, and its code."""
    functions = [
        each for each in ast.parse(file.read_text()).body if isinstance(each, ast.FunctionDef)
    ]
    return [("hide_code" in ast.unparse(f.decorator_list[0]), f.body) for f in functions]


class _WithoutTexts(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(value="") if isinstance(node.value, str) else node


def values_in(body: list[ast.stmt]) -> list[str]:
    """Returns the values that the text of a cell shows, sorted."""
    tree = ast.Module(body=body, type_ignores=[])
    found = [n.value for n in ast.walk(tree) if isinstance(n, ast.FormattedValue)]
    return sorted({ast.unparse(_WithoutTexts().visit(each)) for each in found})


@pytest.mark.parametrize("name", [chapter.name for chapter in chapters()])
def test_both_languages_have_the_same_code_and_show_the_same_values(name: str) -> None:
    english, chinese = (cells(lab(name, language)) for language in LANGUAGES)
    assert [hidden for hidden, _ in english] == [hidden for hidden, _ in chinese]
    for (hidden, ours), (_, theirs) in zip(english, chinese, strict=True):
        if hidden:
            assert values_in(ours) == values_in(theirs)
        else:
            assert list(map(ast.unparse, ours)) == list(map(ast.unparse, theirs))


@pytest.mark.parametrize("name", [chapter.name for chapter in chapters()])
def test_chinese_texts_are_chinese_and_english_texts_are_not(name: str) -> None:
    for language in LANGUAGES:
        for hidden, body in cells(lab(name, language)):
            texts = [n.value for n in ast.walk(ast.Module(body, [])) if isinstance(n, ast.Constant)]
            long = [text for text in texts if isinstance(text, str) and len(text) > 60 and hidden]
            for text in long:
                chinese = any("\u4e00" <= letter <= "\u9fff" for letter in text)
                assert chinese == (language == "zh"), text
