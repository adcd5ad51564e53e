"""Models divided by plans of tensor parallelism: equal to one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.checkpoint import checkpoint

from cases_in_turn import turn
from parallel.worlds.layout_training import CLIP, TOLERANCE, train_alone
from parallel.worlds.planned_models import POSITIONS, VOCAB, FusedDecoder, GroupedDecoder
from parallel.worlds.test_exported_weights import exported
from parallel.worlds.test_layout_checkpoint import shared_folder
from unisono.parallel import Layout, parallelize, plan
from unisono.parallel.layers import CrossEntropy
from unisono.parallel.run import ParallelRun

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
BOUND = 1e-10
GROUPED = {
    "dp=2,tp=2": {},
    "dp=2,tp=2,zero=1": {"tied": False, "bias": False},
    "dp=2,tp=2,zero=3": {},
    "tp=4": {},  # two ranks share each head of keys
}


def test_tensor_plan(outcome):
    outcome.require_success()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(3):
        text = torch.randint(0, VOCAB, (8, POSITIONS + 1), generator=generator)
        targets = text[:, 1:].clone()
        targets[0, 3:] = -100
        found.append((text[:, :-1], targets))
    return found


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def a_run(model: Any, text: str | None, **options: Any) -> ParallelRun:
    return parallelize(
        model,
        *([Layout.parse(text)] if text else []),
        loss=CrossEntropy(VOCAB),
        optimizer=adamw,
        clip=CLIP,
        **options,
    )


def compare(
    make: Callable[[], nn.Module],
    text: str,
    styles: Mapping[str, Any] | None = None,
    later: str = "dp=4,zero=3",
    is_predicted: bool = True,
    returns: bool = False,
) -> None:
    """Fails if a run of a layout, its evaluation, or another layout that loads its checkpoint or
    its export, differs from one process. `returns`: also loads the checkpoint of that layout.
    """
    torch.set_default_dtype(torch.float64)
    whole, data = make(), batches()
    losses, norms = train_alone(whole, CrossEntropy(), data, CLIP, adamw)
    example = data[0][0] if "pp=" in text else None
    run = a_run(make(), text, styles=styles, microbatches=2, example=example)
    for place, batch in enumerate(data[:2]):
        assert float(run.step(*batch)) == pytest.approx(losses[place], rel=TOLERANCE)
        assert run.gradient_norm == pytest.approx(norms[place], rel=TOLERANCE)
    report = run.report()
    assert report.bytes_sent == report.predicted.bytes_sent or not is_predicted
    saved, folder = shared_folder(), shared_folder()
    run.save(saved)
    other = a_run(make(), later, styles=styles)
    other.load(saved)
    if returns:
        other.save(shared := shared_folder())
        run.load(shared)
    for each in (run, other):
        assert float(each.step(*data[2])) == pytest.approx(losses[2], rel=BOUND)
    other.mesh.close()
    with torch.no_grad():
        alone = float(CrossEntropy()(copy.deepcopy(whole).eval()(data[0][0]), data[0][1]))
    assert float(run.evaluate(*data[0])) == pytest.approx(alone, rel=BOUND)
    run.export(folder)
    run.load_weights(folder)
    assert float(run.evaluate(*data[0])) == pytest.approx(alone, rel=BOUND)
    run.mesh.close()
    found = exported(folder)
    assert found.keys() == {name for name, _ in whole.named_parameters()}
    for name, values in whole.named_parameters():
        torch.testing.assert_close(found[name], values.detach(), rtol=BOUND, atol=BOUND)
    dist.barrier()


def own_grouped_decoders(world):
    for text, options in GROUPED.items():
        with turn(text=text):
            make = partial(GroupedDecoder, **options)
            compare(make, text, returns=text == "dp=2,tp=2,zero=3")


def own_hooks_that_see_whole_activations(world):
    def hooked() -> nn.Module:
        model = GroupedDecoder(tied=False)
        model.embed_tokens.register_forward_hook(lambda *found: 2 * found[-1])
        model.lm_head.register_forward_pre_hook(lambda _, given: (given[0].tanh(),))
        return model

    compare(hooked, "dp=2,tp=2", {"embed_tokens": "embedding_rowwise"})
    model = GroupedDecoder()
    model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj: .*would see a part"):
        plan(model, Layout(dp=2, tp=2))


def own_fused_decoders(world):
    for text in ("dp=2,tp=2,zero=1", "dp=2,tp=2,zero=3"):
        with turn(text=text):
            compare(FusedDecoder, text, FusedDecoder.styles, returns="zero=1" in text)


def own_styles_of_torch(world):
    styles = {
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        "embed_tokens": "embedding_rowwise",
        "self_attn.*_proj": "replicate",
    }
    compare(GroupedDecoder, "dp=2,tp=2", styles)


def own_gathered_and_split_layers(world):
    styles = {
        "self_attn.[qkv]_proj": "colwise_rep",
        "self_attn.o_proj": "rowwise_rep",
        "embed_tokens": "embedding_colwise",
        "lm_head": "replicate",
    }
    compare(lambda: GroupedDecoder(tied=False), "tp=4", styles, "dp=2,tp=2,zero=3", returns=True)


def own_pipelines_of_sequences(world):
    def make() -> nn.Module:
        whole = GroupedDecoder(tied=False)
        return nn.Sequential(whole.embed_tokens, *whole.layers, whole.lm_head)

    styles = dict(GroupedDecoder()._tp_plan)
    styles = {name.removeprefix("layers."): style for name, style in styles.items()}
    styles["3"] = styles.pop("lm_head")
    compare(make, "tp=2,pp=2", styles, "dp=2,tp=2,zero=1", returns=True)


def own_pipelines_of_blocks(world):
    for text, options in (
        ("tp=2,pp=2", {}),
        ("tp=2,pp=2,schedule=zb1p", {"tied": False}),
        ("dp=2,pp=2,zero=3", {"layers": 3}),
        ("dp=2,pp=2,vpp=2,zero=2", {"layers": 4, "tied": False}),
    ):
        with turn(text=text):
            compare(partial(GroupedDecoder, **options), text, returns="vpp" in text)


class Shortcut(GroupedDecoder):
    """Adds the embeddings after the blocks, with a weight that is 0 at first."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.share = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x + self.share * first)


def own_pipelines_with_shortcuts_are_refused(world):
    torch.set_default_dtype(torch.float64)
    model = Shortcut()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(ValueError, match="Shortcut uses more in its blocks, or after") as caught:
        a_run(model, "tp=2,pp=2", example=batches()[0][0])
    assert "\n" not in str(caught.value)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    with pytest.raises(ValueError, match="example=inputs"):
        a_run(GroupedDecoder(), "tp=2,pp=2")


def own_a_plan_takes_the_place_of_model_and_layout(world):
    found = plan(GroupedDecoder(), Layout(dp=2, tp=2))
    planned_bytes = int(str(found).split()[-1].replace(",", ""))
    run = a_run(found, None)
    if run.mesh.coordinates["tp"] == 0:
        assert sum(each.nbytes for each in found.model.parameters()) == planned_bytes
    assert {each.style.name for each in found.modules if each.name.endswith("q_norm")} == {
        "replicated_with_grad_allreduce"
    }
    assert found.model.layers[0].mlp.up_proj.weight.shape[0] == 7
    run.mesh.close()
    with pytest.raises(ValueError, match="a forward of its own"):
        a_run(found, None)  # its model is divided already


def own_checkpoints_of_activations(world):
    def make(reentrant: bool) -> nn.Module:
        made = GroupedDecoder(tied=False)
        for each in made.layers:
            each.forward = partial(checkpoint, each.forward, use_reentrant=reentrant)
        return made

    compare(partial(make, False), "dp=2,tp=2,zero=3", is_predicted=False)  # computes twice
    run = a_run(make(True), "dp=2,tp=2")
    with pytest.raises(ValueError, match="use_reentrant=False or tp = 1 works"):
        run.step(*batches()[0])
    run.mesh.close()


def own_frozen_parameters(world):
    def make() -> nn.Module:
        made = GroupedDecoder(tied=False)
        for name, each in made.named_parameters():
            each.requires_grad_("self_attn.q_norm" in name or "mlp.down" in name)
        return made

    compare(make, "dp=2,tp=2,zero=3")


class Caching(GroupedDecoder):
    """Returns keys too, as models with a cache do, of which each rank has its own heads."""

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        keys = self.layers[0].self_attn.k_proj(self.embed_tokens(tokens))
        return {"logits": super().forward(tokens), "keys": keys}


def own_refused_losses_name_the_loss(world):
    def loss(output: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        return CrossEntropy()(output["logits"], targets).square()

    run = parallelize(Caching(), Layout(dp=2, tp=2), loss=loss, optimizer=adamw)
    with pytest.raises(ValueError, match=r"^loss: ") as caught:
        run.step(*batches()[0])
    assert "\n" not in str(caught.value)
    run.mesh.close()


class Scaled(GroupedDecoder):
    """Uses a vector between the modules that divide and those that sum."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        if place == "inside":
            act = self.layers[0].mlp.up_proj
            self.layers[0].mlp.up_proj = nn.Sequential(act, Scale(self.scale))
        else:
            self.layers[0].mlp.down_proj = nn.Sequential(
                self.layers[0].mlp.down_proj, Scale(self.scale)
            )


class Scale(nn.Module):
    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


FAULTS = {
    "inside": (
        {"up_proj": "replicate", "up_proj.0": "colwise"},
        r"scale: each rank of tp uses it for its part",
    ),
    "outside": (
        {
            "down_proj": "replicate",
            "down_proj.0": "rowwise",
            "down_proj.1": "replicated_with_grad_allreduce",
        },
        r"scale: every rank of tp uses it for whole activations",
    ),
}


def own_first_steps_refuse_sums_that_do_not_fit(world):
    for place, (styles, reason) in FAULTS.items():
        model = Scaled(place)
        given = {f"layers.0.mlp.{name}": style for name, style in styles.items()}
        run = a_run(model, "dp=2,tp=2", styles=given)
        before = [each.detach().clone() for each in model.parameters()]
        with turn(place=place), pytest.raises(ValueError, match=reason) as caught:
            run.step(*batches()[0])
        assert "\n" not in str(caught.value)
        for each, values in zip(model.parameters(), before, strict=True):
            assert torch.equal(each, values)
        run.mesh.close()


def own_ranks_refuse_different_plans(world):
    style = "replicate" if dist.get_rank() == 2 else "colwise_gather_output"
    with pytest.raises(ValueError, match="expected equal plans on all ranks") as caught:
        a_run(GroupedDecoder(tied=False), "dp=2,tp=2", styles={"lm_head": style})
    assert "\n" not in str(caught.value)


def own_a_rank_refuses_for_all(world):
    styles = {"lm_hat": "replicate"} if dist.get_rank() == 1 else {}
    with pytest.raises(ValueError, match="matches nothing"):
        a_run(GroupedDecoder(), "dp=2,tp=2", styles=styles)


def own_probabilities_of_dropout_are_refused(world):
    model = GroupedDecoder()
    model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"layers.1.self_attn: .*attention_dropout is a probab"):
        a_run(model, "dp=2,tp=2")
    a_run(model.eval(), "dp=2,tp=2").mesh.close()
