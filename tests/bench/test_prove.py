from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from unisono.algorithms import build
from unisono.commands.main import app
from unisono.schedule import to_json, to_msccl_xml


def prove(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["prove", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout


def test_right_files_are_proved_and_run(tmp_path: Path) -> None:
    xml, ours = tmp_path / "ring.xml", tmp_path / "direct.json"
    xml.write_text(to_msccl_xml(build("all_reduce", "ring", ranks=2)))
    ours.write_text(to_json(build("broadcast", "direct", ranks=2, root=1)))
    code, output = prove(xml, ours, "--run", 2, "--json", "-")
    assert code == 0
    files = json.loads(output)["files"]
    assert [(f["op"], f["ranks"], f["proved"], f["ran"]) for f in files] == [
        ("all_reduce", 2, True, True),
        ("broadcast", 2, True, True),
    ]


def test_files_that_stage_much_run_and_too_much_is_reported(tmp_path: Path) -> None:
    much, more, last = (tmp_path / f"{name}.json" for name in ("much", "more", "last"))
    much.write_text(to_json(build("all_reduce", "ring:channels=300", ranks=3)))
    more.write_text(to_json(build("all_reduce", "ring:channels=3000", ranks=3)))
    last.write_text(to_json(build("all_reduce", "ring", ranks=3)))
    code, output = prove(more, much, last, "--run", 3, "--json", "-")
    assert code == 1
    refused, *right = json.loads(output)["files"]
    assert [(f["proved"], f["ran"]) for f in right] == [(True, True)] * 2
    assert (refused["proved"], refused["ran"]) == (True, False)
    assert "raise UNISONO_STAGING_BYTES" in refused["reason"]


def test_wrong_files_are_refused_with_a_reason(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.xml"
    text = to_msccl_xml(build("all_reduce", "one_shot", ranks=2))
    wrong.write_text(text.replace('type="rrc"', 'type="r"'))
    code, output = prove(wrong, tmp_path / "absent.xml", "--run", 2)
    assert code == 1
    assert "lacks the contribution" in output.replace("\n", " ")
    assert "No such file" in output
    _, large = prove(wrong, "--json", "-")
    assert json.loads(large)["files"][0]["ran"] is None
