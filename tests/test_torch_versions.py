"""The summary of the torch tests on several versions of torch."""

from __future__ import annotations

from pathlib import Path

import pytest

import torch_versions
from torch_versions import Result, read_report

_CASES = {
    "passes": "",
    "refused": '<skipped type="pytest.skip" message="pp = 2 needs torch 2.13 or newer"/>',
    "lacks": '<skipped message="torch 2.9.0 is older than 2.13: it has no such function"/>',
    "no_program": '<skipped message="needs the program iperf3, which is not installed"/>',
    "fails": '<failure message="assert False"/>',
    "no_fixture": '<error message="KeyError"/>',
}


def _report(folder: Path, *names: str) -> Path:
    cases = "".join(
        f'<testcase classname="tests.torch.test_groups" name="{name}">{_CASES[name]}</testcase>'
        for name in names
    )
    path = folder / "tests.xml"
    path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    return path


def _result(folder: Path, *names: str, status: int = 0) -> Result:
    return read_report(_report(folder, *names), torch="2.9.0", status=status, minutes=2.4)


def test_summary_has_one_line_and_the_names_of_skipped_tests(tmp_path: Path) -> None:
    found = _result(tmp_path, "passes", "refused", "lacks", "no_program")
    assert found.line() == (
        "torch 2.9.0: passed; 1 passed, 0 failed, 3 skipped (2 for the version of torch), 2 min"
    )
    assert found.skipped["pp = 2 needs torch 2.13 or newer"] == ["test_groups::refused"]


@pytest.mark.parametrize(
    ("names", "status"),
    [(["passes", "fails"], 1), (["passes", "no_fixture"], 1), (["passes"], 2), ([], 0)],
)
def test_failures_and_missing_tests_are_no_success(
    tmp_path: Path, names: list[str], status: int
) -> None:
    found = _result(tmp_path, *names, status=status)
    assert not found.is_success and "FAILED" in found.line()


def test_a_report_that_pytest_did_not_write_is_no_success(tmp_path: Path) -> None:
    found = read_report(tmp_path / "none.xml", torch="2.9.0", status=3, minutes=0)
    assert not found.is_success and "0 passed" in found.line()


@pytest.mark.parametrize(("failing", "status"), [((), 0), (("2.9.0",), 1), (("2.15.0",), 1)])
def test_each_version_is_tested_and_a_failure_ends_in_status_1(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: tuple[str, ...],
    status: int,
) -> None:
    def tested(requirement: str, wheel: Path) -> Result:
        version = requirement.removeprefix("==")
        failed = ["test_groups::fails"] * (version in failing)
        return Result(
            torch=version, status=len(failed), passed=5, failed=failed, skipped={}, minutes=1
        )

    monkeypatch.setattr(torch_versions, "_build", lambda: Path("unisono.whl"))
    monkeypatch.setattr(torch_versions, "_tested", tested)
    assert torch_versions.main(["==2.9.0", "==2.15.0"]) == status
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0] for line in lines[-2:]] == [
        f"torch {version}: {'FAILED' if version in failing else 'passed'}"
        for version in ("2.9.0", "2.15.0")
    ]
    assert torch_versions.main([]) == 1
