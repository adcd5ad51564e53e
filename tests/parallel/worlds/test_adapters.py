"""Low-rank adapters in the form of peft, of layers that the ranks of `tp` divide."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_model
from parallel.worlds.planned_models import POSITIONS, VOCAB, GroupedDecoder
from unisono.parallel import CrossEntropy, Layout, plan
from unisono.parallel.run import parallelize

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
RANK = 3


def test_adapters(outcome):
    outcome.require_success()


class Adapted(nn.Module):
    """A layer with low-rank adapters, in the form of peft's LoRA."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"own": nn.Linear(layer.in_features, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"own": nn.Linear(RANK, layer.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 2 * self.lora_B["own"](self.lora_A["own"](x))


class Kept(nn.Module):
    """A layer that is trained beside its original, as with `modules_to_save` of peft."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.original_module = layer.requires_grad_(False)
        trained = nn.Linear(layer.in_features, layer.out_features, bias=False)
        self.modules_to_save = nn.ModuleDict({"own": trained})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.modules_to_save["own"](x)


def adapted(key_heads: int = 2, head: type[nn.Module] = Adapted) -> nn.Module:
    model = GroupedDecoder(key_heads=key_heads, tied=False).requires_grad_(False)
    for layer in model.layers:
        for module in (layer.self_attn, layer.mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Adapted(child))
    model.lm_head = head(model.lm_head)
    return model


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, VOCAB, (3, 8, POSITIONS + 1), generator=generator)
    return [(each[:, :-1], each[:, 1:]) for each in text]


def own_adapters_of_divided_layers(world):
    for text, key_heads, head in (
        ("dp=2,tp=2", 2, Adapted),
        ("dp=2,tp=2,zero=3", 2, Kept),
        ("dp=2,tp=2,zero=1", 2, Adapted),
        ("tp=4", 2, Adapted),
        ("dp=4,zero=3", 2, Kept),
    ):
        with turn(text=text, key_heads=key_heads):
            compare_model(
                text,
                lambda key_heads=key_heads, head=head: adapted(key_heads, head),
                lambda: CrossEntropy(VOCAB),
                batches(),
                microbatches=2,
                clip=None,
            )


def own_plan_of_adapters(world):
    torch.set_default_dtype(torch.float64)
    found = plan(adapted(), Layout(dp=2, tp=2))
    styles = {each.name: each.style.name for each in found.modules}
    query, last = "layers.0.self_attn.q_proj", "layers.0.self_attn.o_proj"
    assert styles[f"{query}.base_layer"] == styles[f"{query}.lora_B.own"] == "colwise"
    assert styles[f"{last}.base_layer"] == styles[f"{last}.lora_A.own"] == "rowwise"
    assert f"{query}.lora_A.own" not in styles and f"{last}.lora_B.own" not in styles
    assert styles["layers.0.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    whole = found.replace({"self_attn.*_proj": "replicate", "self_attn.?_norm": "replicate"})
    assert not any("self_attn" in each.name and each.cuts for each in whole.modules)


def own_adapters_that_use_whole_weights(world):
    torch.set_default_dtype(torch.float64)
    model = adapted()
    model.layers[1].mlp.down_proj.lora_variant = {"own": object()}
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj: .* use_dora=False") as caught:
        parallelize(
            model, Layout(tp=4), loss=CrossEntropy(VOCAB),
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        )  # fmt: skip
    assert "\n" not in str(caught.value)
