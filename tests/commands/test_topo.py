from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from unisono import topology
from unisono.commands.main import app
from unisono.errors import UnsupportedError
from unisono.show import network
from unisono.topology.spec import EXAMPLES


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def topo(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["topo", *arguments], env={"COLUMNS": "150"})
    return result.exit_code, result.output


def test_facts_and_files() -> None:
    code, output = topo("torus:4x4", "--svg", "t.svg", "--html", "t.html", "--save", "t.json")
    assert code == 0
    for text in ("2.133 links", "400 GB/s", "64 directed links", "written: t.svg"):
        assert text in output
    assert topology.load("t.json") == topology.torus([4, 4])
    assert {path.name for path in Path.cwd().iterdir()} == {"t.svg", "t.html", "t.json"}


def test_json() -> None:
    result = CliRunner().invoke(app, ["topo", "fat_tree:k=4", "--json", "-"])
    found = json.loads(result.stdout)
    assert (found["num_ranks"], found["num_links"], found["diameter"]) == (16, 48, 6)
    assert found["bisection_Bps"] == 400e9


def test_this_machine_and_files_of_others() -> None:
    code, output = topo("--save", "here.json")
    assert code == 0 and "this machine" in output
    assert topo("here.json")[1].startswith("this machine")
    Path("node.xml").write_text(topology.to_nccl_xml(topology.dgx(8)))
    assert "8 network cards" in topo("node.xml")[1]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (("tours:4",), "expected one of dgx"),
        (("ring:8", "--svg", "x.png"), "must end in .svg"),
        (("ring:8", "--save", "x.xm"), "must end in .json or .xml"),
        (("none.json",), "No such file"),
        (("ring:5000", "--svg", "x.svg"), "at most 4,096 nodes"),
        (("fat_tree:k=4", "--save", "x.xml"), "cannot express network switches"),
    ],
)
def test_invalid_options_are_refused_and_write_no_files(wrong: tuple[str, ...], says: str) -> None:
    code, output = topo(*wrong)
    assert code == 2
    assert says in " ".join(output.replace("│", " ").split())
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("spec", [*EXAMPLES, "torus:3x3x3x3", "ring:1", "dgx:8/torus:4x4"])
def test_drawings_have_every_node_and_cable_apart(spec: str) -> None:
    drawn = topology.parse(spec)
    root = ElementTree.fromstring(network.network_svg(drawn))
    found = [element.get("class") for element in root.iter()]
    assert found.count("node") == drawn.num_nodes
    assert found.count("cable") == drawn.num_links
    points = network.node_positions(drawn).points
    assert len({(round(x, 3), round(y, 3)) for x, y in points.tolist()}) == drawn.num_nodes


def test_a_ring_is_a_circle_and_a_tree_has_levels() -> None:
    x, y = network.node_positions(topology.ring(12)).points.T
    radii = (x**2 + y**2) ** 0.5
    assert radii.max() - radii.min() < 1e-9
    tree = topology.fat_tree(4)
    assert len({y for _, y in network.node_positions(tree).points.tolist()}) == 4


def test_the_page_has_the_routes() -> None:
    page = network.network_html(topology.line(4))
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert "{{" not in page and page.count("line:4") >= 3
    assert data["routes"][0 * 4 + 3] == [0, 1, 2, 3]
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_too_many_nodes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="at most 4,096 nodes"):
        network.network_svg(topology.fat_tree(32))
