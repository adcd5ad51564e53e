"""Models of transformers with tensor parallelism, equal to one process in float64.

These models round some activations to float32, which sums in another order would show. So the tests
leave out these roundings, in one process too.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import distributed as dist
from torch import nn
from torch.nn import functional
from transformers import BatchEncoding

from cases_in_turn import turn
from parallel.worlds.test_exported_weights import exported
from parallel.worlds.test_layout_checkpoint import shared_folder
from unisono.parallel import Layout, model_loss, parallelize, plan

pytestmark = [pytest.mark.torch, pytest.mark.optional]
RANKS = 4
BACKENDS = ("unisono",)
BOUND = 1e-10
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61,
        "num_attention_heads": 4, "max_position_embeddings": 32}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": TEXT | GROUPED,
    "Qwen3ForCausalLM": TEXT | GROUPED,
    "Gemma3ForCausalLM": TEXT
    | GROUPED
    | {"sliding_window": 4, "query_pre_attn_scalar": 8, "num_hidden_layers": 6},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
                        "vocab_size": 61, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
                        "embd_pdrop": 0.0},
    "BertForMaskedLM": TEXT | NO_DROPOUT,
    "MixtralForCausalLM": TEXT | GROUPED | {"num_local_experts": 4},
    "Phi3ForCausalLM": TEXT | {"num_key_value_heads": 2, "pad_token_id": 0, "resid_pdrop": 0.0},
    "ViTForImageClassification": {"hidden_size": 32, "intermediate_size": 48, "image_size": 8,
                                  "num_hidden_layers": 2, "num_attention_heads": 4,
                                  "patch_size": 4, "num_labels": 5} | NO_DROPOUT,
}  # fmt: skip
CONFIGS = {"Gemma3ForCausalLM": "Gemma3TextConfig", "GPT2LMHeadModel": "GPT2Config"}


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Leaves values of float64 as they are where a model converts them to float32."""
    convert, softmax = torch.Tensor.to, functional.softmax

    def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        is_rounded = torch.float32 in (*args, options.get("dtype"))
        return (
            self if self.dtype == torch.float64 and is_rounded else convert(self, *args, **options)
        )

    def exact(x: torch.Tensor, dim: int, **options: Any) -> torch.Tensor:
        return softmax(x, dim)

    exact.__name__ = "softmax"  # by which a watch over functions knows it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", to)
        patch.setattr(torch.Tensor, "float", lambda self: to(self, torch.float32))
        patch.setattr(torch.Tensor, "type", to)
        patch.setattr(functional, "softmax", exact)
        yield


def test_transformers_plans(outcome):
    outcome.require_success()


def a_model(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    name = CONFIGS.get(kind, kind.partition("For")[0] + "Config")
    config = getattr(transformers, name)(**MODELS.get(kind, {}) | options)
    return getattr(transformers, kind)(config).double().train()  # routers may have float32


def batches(kind: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(5):
        if kind.endswith("ForImageClassification"):
            images = torch.randn(8, 3, 8, 8, generator=generator)
            labels = torch.randint(0, 5, (8,), generator=generator)
            found.append({"pixel_values": images, "labels": labels})
            continue
        ids = torch.randint(0, 61, (8, 12), generator=generator)
        labels = ids.clone()
        labels[0, 3:], labels[5:, :4] = -100, -100
        mask = torch.ones_like(ids)
        mask[2, 9:] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def total_and_weight(output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss in float64: of the next words, or of the labels."""
    logits, labels = output.logits, batch["labels"]
    if logits.dim() == 3 and "Masked" not in type(output).__name__:
        logits, labels = logits[:, :-1], labels[:, 1:]
    flat = logits.flatten(0, -2), labels.flatten()
    return functional.cross_entropy(*flat, reduction="sum"), (labels != -100).sum()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


def trained_alone(model: nn.Module, data: list[dict[str, torch.Tensor]]) -> list[float]:
    """Trains a model in this process. Returns the loss and the norm of the gradients of each
    step."""
    optimizer, found = adamw(list(model.parameters())), []
    for batch in data:
        optimizer.zero_grad()
        total, weight = total_and_weight(model(**batch), batch)
        (total / weight).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found += [float(total.detach() / weight), float(norm)]
    return found


@in_float64()
def compare(kind: str, text: str, microbatches: int = 1, **options: Any) -> float:
    """Returns the largest difference from one process: of losses and norms, relative, and of
    weights."""
    model, layout, data = a_model(kind, **options), Layout.parse(text), batches(kind)
    expected = trained_alone(model, data)
    run = parallelize(
        a_model(kind, **options), layout, loss=total_and_weight, optimizer=adamw, clip=1.0,
        microbatches=microbatches, example=data[0] if layout.pp > 1 else None,
    )  # fmt: skip
    found = []
    for batch in data:
        found += [float(run.step(BatchEncoding(batch))), run.gradient_norm]
    with torch.no_grad():
        total, weight = total_and_weight(model.eval()(**data[0]), data[0])
    expected.append(float(total / weight))
    found.append(float(run.evaluate(data[0])))
    assert found == pytest.approx(expected, rel=BOUND)
    report = run.report()
    assert report.bytes_sent == report.predicted.bytes_sent
    run.export(folder := shared_folder())
    run.mesh.close()
    weights = exported(folder)
    largest = 0.0
    for name, values in model.named_parameters():
        difference = float((weights[name] - values.detach()).abs().max())
        assert difference < BOUND, (name, difference)
        largest = max(largest, difference)
    dist.barrier()
    return max([largest, *(abs(a / b - 1) for a, b in zip(found, expected, strict=True))])


def compare_layouts(kind: str, **options: Any) -> None:
    for text in ("dp=2,tp=2", "dp=2,tp=2,zero=3"):
        with turn(kind=kind, text=text):
            found = compare(kind, text, microbatches=2, **options)
            if dist.get_rank() == 0:
                print(f"{kind} {text} {found:.1e}")


def own_causal_models(world):
    for kind in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"):
        compare_layouts(kind)


def own_fused_models(world):
    for kind in ("GPT2LMHeadModel", "Phi3ForCausalLM"):
        compare_layouts(kind)


def own_encoders(world):
    for kind in ("BertForMaskedLM", "ViTForImageClassification"):
        compare_layouts(kind)


def own_heads_of_keys_on_several_ranks(world):
    for kind in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"):
        for attention in ("sdpa", "eager"):
            with turn(kind=kind, attention=attention):
                compare(kind, "tp=4", attn_implementation=attention)


def own_losses_of_models(world):
    model, data = a_model("LlamaForCausalLM"), batches("LlamaForCausalLM")
    run = parallelize(
        a_model("LlamaForCausalLM"), Layout(dp=2, tp=2), loss=model_loss, optimizer=adamw
    )
    alone = float(model(**data[0]).loss)
    assert float(run.step(BatchEncoding(data[0]))) == pytest.approx(alone, rel=1e-6)
    run.mesh.close()


def own_tables_are_divided_with_the_last_layer(world):
    found = plan(a_model("LlamaForCausalLM", tie_word_embeddings=True), Layout(tp=2))
    styles = {each.name: each.style.name for each in found.modules}
    assert styles["model.embed_tokens"] == "embedding_rowwise"
    assert styles["lm_head"] == "colwise_gather_output"
    compare("LlamaForCausalLM", "dp=2,tp=2", tie_word_embeddings=True)


def own_pipelines_of_blocks(world):
    for kind in MODELS:
        is_mixture = kind == "MixtralForCausalLM"
        text = "dp=2,pp=2,zero=2" if is_mixture else "pp=2,tp=2"
        options = {"experts_implementation": "eager"} if is_mixture else {}
        with turn(kind=kind, text=text):
            compare(kind, text, microbatches=2, **options)


def own_pipelines_with_sharded_states(world):
    for text, options in (
        ("dp=2,pp=2,zero=3", {"tie_word_embeddings": True}),
        ("dp=2,pp=2,vpp=2,zero=2", {"num_hidden_layers": 4}),
        ("pp=2,tp=2,schedule=zbv", {"num_hidden_layers": 4}),
    ):
        with turn(text=text):
            compare("LlamaForCausalLM", text, microbatches=4, **options)


def own_dropout_is_refused(world):
    for kind, options in (
        ("LlamaForCausalLM", {"attention_dropout": 0.1}),
        ("BertForMaskedLM", {"attention_probs_dropout_prob": 0.1}),
        ("ViTForImageClassification", {"attention_probs_dropout_prob": 0.1}),
    ):
        with turn(kind=kind), pytest.raises(ValueError, match="tp = 1 works"):
            parallelize(
                a_model(kind, **options), Layout(dp=2, tp=2), loss=total_and_weight, optimizer=adamw
            )


def own_experts_stay_whole(world):
    compare("MixtralForCausalLM", "dp=2,tp=2", experts_implementation="eager")
