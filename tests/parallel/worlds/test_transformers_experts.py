"""Mixture models of transformers whose experts `ep` divides: equal to one process in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("transformers")

from torch import distributed as dist

from cases_in_turn import turn
from parallel.worlds.sequence_models import compare_sequences
from parallel.worlds.test_layout_checkpoint import shared_folder
from parallel.worlds.test_transformers_plans import (
    GROUPED,
    TEXT,
    a_model,
    adamw,
    batches,
    compare,
    in_float64,
    total_and_weight,
)
from parallel.worlds.test_transformers_sequences import batches as sequences
from parallel.worlds.test_transformers_sequences import logits_of, loss_of
from unisono.parallel import Layout, model_loss, parallelize, plan

pytestmark = [pytest.mark.torch, pytest.mark.optional]
RANKS = 4
BACKENDS = ("unisono",)
CHOICES = {"num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
          "v_head_dim": 8}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": TEXT | GROUPED | {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": TEXT | GROUPED | CHOICES
    | {"num_experts": 4, "moe_intermediate_size": 12},
    "Qwen2MoeForCausalLM": TEXT | {"num_key_value_heads": 2} | CHOICES
    | {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
    "DeepseekV3ForCausalLM": TEXT | {"num_key_value_heads": 4} | CHOICES | LATENT
    | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
       "moe_intermediate_size": 12},
    "GptOssForCausalLM": TEXT | GROUPED | CHOICES | {"num_local_experts": 4, "sliding_window": 4},
    "OlmoeForCausalLM": TEXT | {"num_key_value_heads": 2} | CHOICES
    | {"num_experts": 4, "pad_token_id": 0},
}  # fmt: skip


def test_transformers_experts(outcome):
    outcome.require_success()


def compare_layouts(kind: str, *texts: str, implementation: str = "eager") -> None:
    for text in texts:
        with turn(kind=kind, text=text):
            options = MODELS[kind] | {"experts_implementation": implementation}
            found = compare(kind, text, microbatches=2, **options)
            if dist.get_rank() == 0:
                print(f"{kind} {text} {found:.1e}")


def own_experts_by_data(world):
    for kind in MODELS:
        compare_layouts(kind, "dp=4,ep=4", "dp=4,ep=2,zero=3")


def own_experts_with_tensor_parallelism(world):
    for kind in MODELS:
        compare_layouts(kind, "dp=2,tp=2,ep=4")
    compare_layouts("DeepseekV3ForCausalLM", "dp=2,tp=2,ep=2,zero=1")


@in_float64()
def own_divided_sequences(world):
    for kind, sizes in MODELS.items():
        options = sizes | {"experts_implementation": "eager"}
        for text in ("dp=2,cp=2,ep=4", "cp=4,ep=2,zero=3")[: 1 + (kind == "GptOssForCausalLM")]:
            with turn(kind=kind, text=text):
                compare_sequences(
                    text,
                    partial(a_model, kind, **options),
                    sequences(kind, masked=True),
                    alone=lambda model, batch: loss_of(logits_of(model, batch), batch),
                    loss=loss_of,
                    call=logits_of,
                    tolerance=1e-10,
                )


def own_implementations(world):
    compare_layouts("MixtralForCausalLM", "dp=4,ep=2", implementation="batched_mm")
    kind, found = "GptOssForCausalLM", []
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model = a_model(kind, **MODELS[kind], experts_implementation=implementation).float()
        run = parallelize(model, Layout(dp=4, ep=4), loss=total_and_weight, optimizer=adamw)
        found.append([float(run.step(batch)) for batch in batches(kind)[:3]])
        run.mesh.close()
    assert found[1:] == [pytest.approx(found[0], rel=1e-5)] * 2


def own_balance_losses_are_exact_or_refused(world):
    kind = "MixtralForCausalLM"
    options = MODELS[kind] | {"output_router_logits": True, "experts_implementation": "eager"}
    data = batches(kind)[:2]
    for text in ("dp=4,ep=2", "dp=2,tp=2,ep=4"):
        run = parallelize(
            a_model(kind, **options), Layout.parse(text), loss=model_loss, optimizer=adamw
        )
        with pytest.raises(ValueError, match="is not the result of one loss of torch") as caught:
            run.step(data[0])
        assert "\n" not in str(caught.value)
        run.mesh.close()
    model = a_model(kind, **options)
    optimizer, expected = adamw(list(model.parameters())), []
    for batch in data:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    run = parallelize(
        a_model(kind, **options), Layout(tp=4, ep=4), loss=model_loss, optimizer=adamw
    )
    assert [float(run.step(batch)) for batch in data] == pytest.approx(expected, rel=1e-6)
    run.mesh.close()


def own_checkpoints_in_other_layouts(world):
    kind, found = "DeepseekV3ForCausalLM", []
    batch, folder = batches(kind)[0], shared_folder()
    for text in ("dp=4,ep=4,zero=1", "dp=2,tp=2,ep=2", "dp=4"):
        run = parallelize(
            a_model(kind, **MODELS[kind], experts_implementation="eager"),
            Layout.parse(text),
            loss=total_and_weight,
            optimizer=adamw,
        )
        if found:
            run.load(folder)
        else:
            run.step(batch)
            run.save(folder)
        found.append(float(run.evaluate(batch)))
        run.mesh.close()
    assert found == pytest.approx(found[:1] * 3, rel=1e-6)


def own_plans_of_models(world):
    for kind, options in MODELS.items():
        model = a_model(kind, **options)
        found = plan(model, Layout(dp=2, ep=2)).experts
        stacked = [name for name, each in model.named_parameters() if each.dim() == 3]
        names = [f"{each.name}.{name}" for each in found for name in each.parameters]
        assert set(stacked) <= set(names) and found


def own_other_experts_are_refused(world):
    model = a_model("LlamaForCausalLM", **TEXT | GROUPED)
    with pytest.raises(ValueError, match="found no experts to divide in LlamaForCausalLM;"):
        plan(model, Layout(dp=2, ep=2))
