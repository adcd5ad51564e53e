"""A model of transformers that is trained in a layout, exported, and loaded by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import torch
import transformers

from integrations.exported_llama import BATCHES, adam, llama, loss_of
from worlds.forked_program import run_program

pytestmark = pytest.mark.optional
PROGRAM = Path(__file__).with_name("exported_llama.py")


@pytest.mark.parametrize("ties", ["tied", "untied"])
@pytest.mark.parametrize("layout", ["dp=2,zero=3", "dp=2"])
def test_transformers_loads_an_export(layout: str, ties: str, tmp_path: Path) -> None:
    alone = llama(tied=ties == "tied")
    optimizer = adam(alone.parameters())
    for batch in BATCHES:
        total, weight = loss_of(alone(batch[:, :-1]), batch[:, 1:])
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
    folder = tmp_path / "model"
    words = (str(folder), layout, ties)
    run_program(PROGRAM, *words, folder=tmp_path, log=tmp_path / "log", timeout_s=100)
    for each in (folder, tmp_path / "again"):
        found = transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.float64)
        assert type(found).__name__ == "LlamaForCausalLM"
        values = found.state_dict()
        for name, expected in alone.state_dict().items():
            torch.testing.assert_close(values[name], expected, rtol=1e-10, atol=1e-10)
        with torch.no_grad():  # from_pretrained computes the angles of positions in float32
            expected, logits = alone(BATCHES[0]).logits, found(BATCHES[0]).logits
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
