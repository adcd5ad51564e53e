"""LoRA adapters of peft in a Llama of transformers, equal to one process in float64."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn
from transformers import BatchEncoding

from cases_in_turn import turn
from parallel.worlds.test_layout_checkpoint import shared_folder
from parallel.worlds.test_transformers_plans import (
    a_model,
    adamw,
    batches,
    in_float64,
    total_and_weight,
    trained_alone,
)
from unisono.parallel import Layout, model_loss, parallelize

pytestmark = [pytest.mark.torch, pytest.mark.optional]
RANKS = 4
BACKENDS = ("unisono",)
BOUND = 1e-10
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_peft_models(outcome):
    outcome.require_success()


def adapted(kind: str = "LlamaForCausalLM", **options: Any) -> nn.Module:
    model = a_model(kind)
    torch.manual_seed(1)
    given = {"r": 3, "lora_alpha": 8, "target_modules": EVERY, "init_lora_weights": False} | options
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **given)).double()


def loaded(folder: Path) -> nn.Module:
    """Returns the model with the adapter of a folder, loaded by peft."""
    return peft.PeftModel.from_pretrained(a_model("LlamaForCausalLM"), folder).double()


@in_float64()
def compare(text: str, microbatches: int = 2, **options: Any) -> None:
    model, layout, data = adapted(**options), Layout.parse(text), batches("LlamaForCausalLM")
    expected = trained_alone(model, data)
    loss = model_loss if layout.cp > 1 else total_and_weight
    run = parallelize(
        adapted(**options), layout, loss=loss, optimizer=adamw, clip=1.0,
        microbatches=microbatches, example=data[0] if layout.pp > 1 else None,
    )  # fmt: skip
    found = []
    for batch in data:
        found += [float(run.step(BatchEncoding(batch))), run.gradient_norm]
    assert found == pytest.approx(expected, rel=BOUND)
    run.export(folder := shared_folder())
    names = sorted(each.name for each in folder.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    weights = load_file(folder / "adapter_model.safetensors")
    alone = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    assert weights.keys() == alone.keys()
    for name, each in alone.items():
        torch.testing.assert_close(weights[name], each.detach(), rtol=0, atol=BOUND)
    again = loaded(folder)
    for name, each in again.state_dict().items():
        torch.testing.assert_close(each, model.state_dict()[name], rtol=0, atol=BOUND)
    run.mesh.close()
    fresh = parallelize(
        adapted(**options), layout, loss=loss, optimizer=adamw,
        microbatches=microbatches, example=data[0] if layout.pp > 1 else None,
    )  # fmt: skip
    fresh.load_weights(folder)
    with torch.no_grad():
        total, weight = total_and_weight(model.eval()(**data[0]), data[0])
    assert float(fresh.evaluate(data[0])) == pytest.approx(float(total / weight), rel=BOUND)
    fresh.mesh.close()
    dist.barrier()


def own_adapters(world):
    for text in ("dp=4,zero=1", "dp=2,tp=2,zero=3", "dp=2,pp=2,zero=2", "pp=2,tp=2", "dp=2,pp=2",
                 "tp=2,cp=2", "pp=2,cp=2"):  # fmt: skip
        with turn(text=text):
            compare(text)


def own_adapters_with_biases_and_trained_modules(world):
    compare("dp=2,tp=2,zero=3", modules_to_save=["lm_head"], target_modules=["q_proj", "down_proj"])
    compare("dp=4,zero=3", use_dora=True)
    with pytest.raises(ValueError, match="use_dora=False"):
        compare("tp=4", use_dora=True)


def own_parameters_of_no_adapter(world):
    model = adapted()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    run = parallelize(model, Layout(dp=4), loss=total_and_weight, optimizer=adamw)
    with pytest.raises(ValueError, match=r"export: .*norm\.weight is trained, but is no part"):
        run.export(shared_folder())
    run.mesh.close()


def own_adapters_that_tp_cannot_divide(world):
    for config, message in (
        (peft.IA3Config(task_type="CAUSAL_LM", target_modules=EVERY, feedforward_modules=[]),
         "style 'colwise' divides an nn.Linear .* style 'replicate' works"),
        (peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=EVERY, total_step=9),
         "style 'colwise' divides an nn.Linear .* style 'replicate' works"),
    ):  # fmt: skip
        model = peft.get_peft_model(a_model("LlamaForCausalLM"), config)
        with turn(config=type(config).__name__), pytest.raises(ValueError, match=message) as caught:
            parallelize(model, Layout(tp=4), loss=total_and_weight, optimizer=adamw)
        assert "\n" not in str(caught.value)


def own_adapters_on_the_device_meta(world):
    def made() -> nn.Module:
        with torch.device("meta"):
            return adapted(init_lora_weights=True)

    with pytest.raises(ValueError, match=r"lora_A\.default\.weight: .*reset_lora_parameters"):
        parallelize(made(), Layout(dp=4, zero=3), loss=total_and_weight, optimizer=adamw)
    model = made()
    torch.manual_seed(2)
    for layer in model.modules():
        if hasattr(layer, "reset_lora_parameters"):
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters("default", True)
    run = parallelize(model, Layout(dp=4, zero=3), loss=total_and_weight, optimizer=adamw)
    run.export(folder := shared_folder())
    weights = load_file(folder / "adapter_model.safetensors")
    assert all(("lora_B" in name) == (not each.any()) for name, each in weights.items())
    run.step(BatchEncoding(batches("LlamaForCausalLM")[0]))
    run.mesh.close()
