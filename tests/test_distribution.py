"""The files that permit others to use the project, and the metadata of an installed copy."""

from __future__ import annotations

import hashlib
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import unisono

_ROOT = Path(__file__).parents[1]
_APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]


def test_the_license_is_the_text_of_apache_2() -> None:
    assert hashlib.sha256((_ROOT / "LICENSE").read_bytes()).hexdigest() == _APACHE_2


def test_metadata_state_the_license_and_the_version_of_the_package() -> None:
    found = metadata.metadata("unisono")
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Version"] == unisono.__version__
    assert found["Author"] == "The Unisono developers"


def test_the_version_is_stated_once() -> None:
    assert "version" in _PROJECT["dynamic"] and "version" not in _PROJECT
    for name in ("CMakeLists.txt", "CITATION.cff", "README.md", "pyproject.toml", "SECURITY.md"):
        lines = (_ROOT / name).read_text().splitlines()
        own = [line for line in lines if re.search(r"unisono|^version", line, re.IGNORECASE)]
        assert not any(unisono.__version__ in line for line in own), name


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("LICENSE", "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION"),
        ("NOTICE", "nanobind (BSD-3-Clause)"),
        ("nanobind.txt", "Redistributions in binary form must reproduce"),
        ("robin_map.txt", "Permission is hereby granted, free of charge"),
        ("numpy.txt", "NumPy Developers"),
    ],
)
def test_an_installed_copy_has_the_license_texts_of_its_parts(name: str, part: str) -> None:
    files = metadata.files("unisono") or []
    texts = [f.read_text() for f in files if f.parent.name == "licenses" and f.name == name]
    assert len(texts) == 1 and part in texts[0]


def test_the_notice_lists_every_license_text() -> None:
    build = (_ROOT / "csrc" / "bind" / "licenses.cmake").read_text()
    names = set(re.findall(r"copy_license\((\w+)|/(\w+)\.txt", build))
    copied = {first or second for first, second in names} - {"name", "LICENSE"}
    (runtime,) = re.findall(r"foreach\(library (.*)\)", build)
    listed = re.findall(r"(\w+)\.txt", (_ROOT / "NOTICE").read_text())
    assert copied | set(runtime.split()) == set(listed)
    assert {"libcxx", "libcxxabi", "libunwind", "nanobind", "numpy", "robin_map"} < set(listed)


def test_the_security_page_names_only_files_that_exist() -> None:
    text = (_ROOT / "SECURITY.md").read_text()
    named = re.findall(r"`((?:tests|csrc|docs)/[\w/.]+)`|\]\(([\w/.]+)", text)
    assert named
    for first, second in named:
        assert (_ROOT / (first or second)).exists(), first or second
