"""Layouts that an older torch cannot run are refused, and only these refusals skip a test."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.torch_version import TorchVersion  # noqa: E402

from unisono.errors import UnsupportedError  # noqa: E402
from unisono.parallel import Layout, pipeline_schedule  # noqa: E402
from unisono.parallel.run.model_checks import check_torch  # noqa: E402
from worlds.torch_version import REFUSED, needs_layouts, needs_torch, refusal  # noqa: E402

pytestmark = pytest.mark.torch
INSTALLED = torch.__version__
USES = {
    "pp": lambda: check_torch(Layout.parse("pp=2")),
    "schedule": lambda: pipeline_schedule(Layout.parse("pp=2,schedule=zb1p"), microbatches=2),
    "zero": lambda: check_torch(Layout.parse("dp=2,zero=2")),
}


@pytest.fixture
def on_torch(monkeypatch):
    return lambda version: monkeypatch.setattr(torch, "__version__", TorchVersion(version))


@pytest.mark.parametrize("field", REFUSED)
def test_listed_features_are_refused_until_their_version(on_torch, field):
    on_torch("2.12.1+cpu")
    with pytest.raises(UnsupportedError) as caught:
        USES[field]()
    assert refusal(caught.value).endswith(f"needs torch {REFUSED[field]} or newer")
    on_torch(f"{REFUSED[field]}.0+cpu")
    assert not refusal(caught.value), "a skip on a version that has the feature"
    if REFUSED[field] <= INSTALLED:
        USES[field]()


@pytest.mark.parametrize("text", ["dp=4", "dp=2,tp=2,zero=1", "dp=2,cp=2", "dp=2,ep=2"])
def test_other_layouts_run_on_the_oldest_torch(on_torch, text):
    on_torch("2.9.0")
    check_torch(Layout.parse(text))
    needs_layouts("dp=2", text)


def test_one_refused_layout_of_several_skips_a_test(on_torch):
    on_torch("2.9.0")
    with pytest.raises(pytest.skip.Exception, match="unisono refuses pp > 1"):
        needs_layouts("dp=2", "dp=2,pp=2")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("tp = 2 needs torch 2.13 or newer, found torch 2.9.0: install it", UnsupportedError),
        ("pp = 1 needs torch 2.13 or newer, found torch 2.9.0: install it", UnsupportedError),
        ("pp = 2 needs torch 2.14 or newer, found torch 2.9.0: install it", UnsupportedError),
        ("pp = 2 needs torch 2.13 or newer, found torch 2.9.0: install it", RuntimeError),
        ("the layout: pp = 2 needs torch 2.13 or newer, found torch 2.9.0", UnsupportedError),
    ],
)
def test_other_refusals_are_failures(on_torch, text, kind):
    on_torch("2.9.0")
    assert not refusal(kind(text))


def test_a_refusal_in_the_place_of_another_error_skips(on_torch):
    on_torch("2.9.0")
    with pytest.raises(AssertionError) as caught, pytest.raises(ValueError, match="batch norm"):
        USES["zero"]()
    assert refusal(caught.value) == "zero = 2 needs torch 2.13 or newer"


def test_functions_of_newer_versions(on_torch):
    on_torch("2.13.1+cpu")
    needs_torch("2.13", "it has no messages")
    with pytest.raises(pytest.skip.Exception, match=r"torch 2\.13\.1\+cpu is older than 2\.15: it"):
        needs_torch("2.15", "it has no messages")
