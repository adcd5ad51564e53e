"""Models of transformers, trained by their own losses: equal to one process.

The losses of these models round logits to float32, so results differ by roundings of float32.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import distributed as dist
from torch import nn
from transformers import BatchEncoding

from cases_in_turn import turn
from unisono.parallel import Layout, Precision, model_loss, parallelize

pytestmark = [pytest.mark.torch, pytest.mark.optional]
RANKS = 2
BACKENDS = ("unisono",)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 61,
         "num_attention_heads": 4, "max_position_embeddings": 32}  # fmt: skip
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BOUND = 1e-5


def test_transformers_models(outcome):
    outcome.require_success()


def a_model(kind: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    name, _, _ = kind.partition("For")
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    return getattr(transformers, kind)(config).train()


def batches(kind: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(2):
        ids = torch.randint(0, 61, (8, 12), generator=generator)
        labels = ids.clone()
        labels[0, 3:], labels[5:, :4] = -100, -100
        if kind.endswith("SequenceClassification"):
            labels = labels[:, 0].abs() % 2
        mask = torch.ones_like(ids)
        mask[2, 9:] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


def compare(kind: str, text: str, microbatches: int, **options: object) -> None:
    torch.set_default_dtype(torch.float32)
    model, layout, data = a_model(kind, **options), Layout.parse(text), batches(kind)
    optimizer, expected = adamw(list(model.parameters())), []
    for batch in data:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected += [float(loss.detach()), float(norm)]
    run = parallelize(
        a_model(kind, **options), layout, loss=model_loss, optimizer=adamw, clip=1.0,
        microbatches=microbatches, example=BatchEncoding(data[0]) if layout.pp > 1 else None,
    )  # fmt: skip
    found = []
    for batch in data:
        found += [float(run.step(BatchEncoding(batch))), run.gradient_norm]
    assert found == pytest.approx(expected, rel=BOUND)
    with torch.no_grad():
        alone = float(model.eval()(**data[0]).loss)
    assert float(run.evaluate(data[0])) == pytest.approx(alone, rel=BOUND)
    run.mesh.close()


def compare_layouts(kind: str, **options: object) -> None:
    for text, microbatches in (("dp=2", 3), ("dp=2,zero=3", 2), ("pp=2", 2)):
        with turn(kind=kind, text=text):
            compare(kind, text, microbatches, **options)


def own_causal_models(world):
    compare_layouts("LlamaForCausalLM", num_key_value_heads=2)


def own_masked_models(world):
    compare_layouts("BertForMaskedLM", **WITHOUT_DROPOUT)


def own_classifiers(world):
    compare_layouts("BertForSequenceClassification", **WITHOUT_DROPOUT)


def own_balance_losses_are_refused(world):
    torch.set_default_dtype(torch.float32)
    options = {"num_local_experts": 4, "num_key_value_heads": 2, "output_router_logits": True}
    run = parallelize(
        a_model("MixtralForCausalLM", **options), Layout(dp=2), loss=model_loss, optimizer=adamw
    )
    with pytest.raises(ValueError, match="is not the result of one loss of torch") as caught:
        run.step(batches("MixtralForCausalLM")[0])
    assert "\n" not in str(caught.value)
    run.mesh.close()


def own_models_on_meta(world):
    """Tests models that are made on meta: from an export, and from a seed in all layouts alike."""
    torch.set_default_dtype(torch.float32)
    options = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    found = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    folder, data = Path(found[0]), batches("LlamaForCausalLM")

    def start(model, text, **more):
        return parallelize(
            model, Layout.parse(text), loss=model_loss, optimizer=adamw, microbatches=2, **more,
            example=BatchEncoding(data[0]) if "pp" in text else None,
        )  # fmt: skip

    def on_meta():
        with torch.device("meta"):
            return a_model("LlamaForCausalLM", **options)

    run = start(a_model("LlamaForCausalLM", **options), "dp=2")
    run.export(folder)
    expected = [float(run.step(BatchEncoding(each))) for each in data]
    run.mesh.close()
    from_seed = []
    for text in ("dp=2", "dp=2,zero=3", "tp=2", "pp=2"):
        with turn(text=text):
            run = start(on_meta(), text, weights=folder)
            losses = [float(run.step(BatchEncoding(each))) for each in data]
            assert losses == pytest.approx(expected, rel=BOUND)
            run.mesh.close()
            torch.manual_seed(4)
            run = start(on_meta(), text)
            from_seed.append([float(run.step(BatchEncoding(each))) for each in data])
            run.mesh.close()
    for each in from_seed:
        assert each == pytest.approx(from_seed[0], rel=BOUND)
        assert each != pytest.approx(expected, rel=BOUND)


def own_computation_in_bfloat16(world):
    """Tests that the layouts agree up to roundings, and with float32."""
    torch.set_default_dtype(torch.float32)
    for kind, options in (
        ("LlamaForCausalLM", {"num_key_value_heads": 2}), ("BertForMaskedLM", WITHOUT_DROPOUT),
    ):  # fmt: skip
        data = batches(kind)
        texts = ["dp=2", "dp=2,zero=3", "tp=2", "pp=2"]
        for text in ["exact", *texts, *(["cp=2"] if kind.startswith("Llama") else [])]:
            with turn(kind=kind, text=text):
                run = parallelize(
                    a_model(kind, **options), Layout.parse("dp=2" if text == "exact" else text),
                    loss=model_loss, optimizer=adamw, clip=1.0, microbatches=2,
                    example=BatchEncoding(data[0]) if "pp" in text else None,
                    precision=None if text == "exact" else Precision(computation=torch.bfloat16),
                )  # fmt: skip
                found = [float(run.step(BatchEncoding(each))) for each in data]
                if text == "exact":
                    expected, norm = found, run.gradient_norm
                assert found == pytest.approx(expected, rel=0.01)
                assert run.gradient_norm == pytest.approx(norm, rel=0.05)
                run.mesh.close()
