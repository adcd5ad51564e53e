"""Plans of tensor parallelism: what they show, and what they refuse before anything is changed."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel

from parallel.worlds.planned_models import FusedDecoder, GroupedDecoder
from unisono.parallel import Layout, ModelPlan, Precision, plan
from unisono.parallel.layers import TransformerModel
from unisono.parallel.run.planned_division import planned_precision
from unisono.planner import Transformer

pytestmark = pytest.mark.torch
TP2 = Layout(tp=2)


def kept(found: ModelPlan) -> dict[str, tuple[str, int]]:
    """Returns the style of each divided module, and the length that rank 0 keeps of its weight."""
    return {
        each.name: (each.style.name, each.cuts["weight"].length(0))
        for each in found.modules
        if each.cuts
    }


def test_plans_follow_the_styles_of_a_model() -> None:
    model = GroupedDecoder(layers=1)
    found = plan(model, TP2)
    assert kept(found) == {
        "embed_tokens": ("embedding_rowwise", 7),  # shares the weight of lm_head
        "layers.0.self_attn.q_proj": ("colwise", 8),
        "layers.0.self_attn.k_proj": ("colwise", 4),
        "layers.0.self_attn.v_proj": ("colwise", 4),
        "layers.0.self_attn.o_proj": ("rowwise", 8),
        "layers.0.mlp.gate_proj": ("colwise", 7),
        "layers.0.mlp.up_proj": ("colwise", 7),
        "layers.0.mlp.down_proj": ("rowwise", 7),
        "lm_head": ("colwise_gather_output", 7),
    }
    assert plan(model, Layout(dp=2)).modules == ()


def test_plans_are_tables() -> None:
    text = str(plan(GroupedDecoder(tied=False), TP2))
    head, columns, *rows = text.splitlines()
    assert head == "GroupedDecoder with tp2"
    assert columns.split("  ")[0] == "module"
    (row,) = (row for row in rows if row.startswith("layers.*.self_attn.k_proj x 2"))
    assert "weight: 4 of 8; bias: 4 of 8" in row
    nbytes = 2 * (24 * 8 + 8) * torch.get_default_dtype().itemsize
    assert row.split()[-2:] == [f"{nbytes:,}", f"{nbytes // 2:,}"]
    (row,) = (row for row in rows if "q_norm" in row)
    assert "replicated_with_grad_allreduce" in row
    whole = sum(each.nbytes for each in GroupedDecoder(tied=False).parameters())
    assert rows[-1].split()[:3] == ["all", "parameters", f"{whole:,}"]


def test_plans_count_the_heads_of_a_rank() -> None:
    (attention,) = (
        each for each in plan(FusedDecoder(), TP2, styles=FusedDecoder.styles).modules
        if each.name == "h.0.attn"
    )  # fmt: skip
    assert attention.local_values == {"num_heads": 3, "split_size": 12}
    (four,) = (
        each for each in plan(GroupedDecoder(heads=8, key_heads=2), Layout(tp=4)).modules
        if each.name == "layers.0.self_attn"
    )  # fmt: skip
    assert four.local_values == {"num_key_value_groups": 2}


def test_plans_count_heads_under_other_names() -> None:
    model = GroupedDecoder(heads=4, key_heads=2)
    attention = model.layers[0].self_attn
    attention.n_local_heads, attention.n_local_kv_heads, attention.head_dims = 4, 2, 4
    found = {each.name: each.local_values for each in plan(model, TP2).modules}
    assert found["layers.0.self_attn"] == {"n_local_heads": 2, "n_local_kv_heads": 1}


def test_replaced_plans_keep_their_other_styles() -> None:
    first = plan(GroupedDecoder(), TP2, styles={"mlp.*_proj": "replicate"})
    second = first.replace({"layers.1.self_attn.*_proj": "replicate"})
    assert {name for name in kept(second) if "layers" in name} == {
        f"layers.0.self_attn.{each}_proj" for each in "qkvo"
    }
    assert len(kept(first)) == len(kept(second)) + 4


def test_styles_that_are_not_supported_leave_their_modules_whole() -> None:
    model = GroupedDecoder(tied=False)
    model._tp_plan["layers.*.mlp"] = "moe_tp_experts"
    model._tp_plan["layers.*.mlp.up_proj.weight"] = "grouped_gemm"
    assert not any("mlp" in name for name in kept(plan(model, TP2)))
    assert len(kept(plan(model, TP2))) == 9


class Configured(nn.Module):
    """Reads its number of heads from a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.head_dim = nn.Module(), 4
        self.q_proj, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.q_proj(x).view(-1, self.config.num_attention_heads, 4))


def hooked() -> nn.Module:
    made = GroupedDecoder()
    made.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    return made


def tables() -> nn.Module:
    return nn.ModuleDict({"one": nn.Embedding(8, 4, max_norm=1.0), "two": nn.Linear(4, 8)})


def unknown() -> nn.Module:
    made = GroupedDecoder()
    del made.layers[0].self_attn.head_dim
    return made


SHAPE = Transformer(layers=1, hidden=8, heads=2, vocab=10, positions=4)
REFUSED = {
    "no module": (
        GroupedDecoder,
        TP2,
        {"layers.*.mlp.fc1": "colwise"},
        "'layers.*.mlp.fc1' matches nothing in GroupedDecoder; expected the end",
    ),
    "a parameter": (
        GroupedDecoder,
        TP2,
        {"q_proj.weight": "colwise"},
        "matches a parameter in .* such as 'layers.0.self_attn.q_proj'",
    ),
    "a word": (
        GroupedDecoder,
        TP2,
        {"q_proj": "columns"},
        "expected one of colwise, .*, got 'columns'",
    ),
    "one rank": (GroupedDecoder, Layout(), {"q_proj": "columns"}, "got 'columns'"),
    "sequence_parallel": (
        GroupedDecoder,
        TP2,
        {"norm": "sequence_parallel"},
        "'replicate' computes the same",
    ),
    "torch's options": (
        GroupedDecoder,
        TP2,
        {"q_proj": ColwiseParallel(use_local_output=False)},
        "expected one of",
    ),
    "torch's sequences": (GroupedDecoder, TP2, {"norm": SequenceParallel()}, "expected one of"),
    "heads": (
        lambda: GroupedDecoder(heads=3, key_heads=1),
        TP2,
        {},
        "q_proj: tp = 2 does not divide the 3 heads",
    ),
    "heads of keys": (
        lambda: GroupedDecoder(heads=12, key_heads=3),
        TP2,
        {},
        "k_proj: tp = 2 does not divide the 3 heads",
    ),
    "more ranks": (
        lambda: GroupedDecoder(heads=8, inner=4),
        Layout(tp=8),
        {},
        "leaves ranks without a part",
    ),
    "parts of heads": (
        GroupedDecoder,
        TP2,
        {"self_attn.q_proj": "packed_colwise", "lm_head": "packed_colwise"},
        "2 layers of equal size, got 13",
    ),
    "no heads": (
        GroupedDecoder,
        TP2,
        {"mlp.up_proj": "qkv_colwise"},
        "needs a module with head_dim or num_heads",
    ),
    "not fused": (
        GroupedDecoder,
        TP2,
        {"self_attn.q_proj": "qkv_colwise"},
        "as many outputs for keys as for values",
    ),
    "no sum": (
        GroupedDecoder,
        TP2,
        {"layers.0.mlp.down_proj": "replicate"},
        "layers.0.mlp.gate_proj: style 'colwise' divides the outputs, but no",
    ),
    "no parts": (
        GroupedDecoder,
        TP2,
        {"layers.1.mlp.[gu]*_proj": "replicate"},
        "layers.1.mlp.down_proj: style 'rowwise' expects divided inputs",
    ),
    "a tie": (
        GroupedDecoder,
        TP2,
        {"lm_head": "replicate", "embed_tokens": "embedding_rowwise"},
        "embed_tokens.weight and lm_head.weight are one parameter",
    ),
    "a norm": (
        GroupedDecoder,
        TP2,
        {"mlp_norm": "colwise"},
        "divides an nn.Linear or a Conv1D of GPT-2, but the module is a LayerNorm",
    ),
    "a hook": (hooked, TP2, {}, "layers.1.mlp.up_proj: .* has hooks"),
    "max_norm": (tables, TP2, {"one": "embedding_rowwise"}, "has max_norm"),
    "unknown heads": (
        unknown,
        TP2,
        {"self_attn.[qkv]_proj": "colwise"},
        "layers.0.self_attn: 3 layers of a GroupedAttention divide their outputs",
    ),
    "fused layers": (
        FusedDecoder,
        TP2,
        FusedDecoder.styles | {"mlp.gate_up_proj": "colwise"},
        "h.0.mlp.gate_up_proj: style 'colwise' divides 20 outputs, but h.0.mlp.down_proj sums over",
    ),
    "fused attention": (
        FusedDecoder,
        TP2,
        FusedDecoder.styles | {"attn.c_attn": "colwise"},
        "h.0.attn.c_attn: style 'colwise' divides 72 outputs",
    ),
    "a configuration": (
        Configured,
        TP2,
        {"q_proj": "colwise", "o_proj": "rowwise"},
        "the forward pass of Configured reads config.num_attention_heads",
    ),
    "sequences": (
        GroupedDecoder,
        Layout(tp=2, sequence_parallel=True),
        {},
        "sequence_parallel divides the modules of TransformerModel",
    ),
    "a grid": (
        GroupedDecoder,
        Layout(tp=4, tensor="2d"),
        {},
        "tensor = 2d divides the modules of TransformerModel",
    ),
    "own division": (
        lambda: TransformerModel(SHAPE, seed=1),
        TP2,
        {"query": "colwise", "output": "rowwise"},
        "which divides itself",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plans_refuse(case: str) -> None:
    make, layout, styles, reason = REFUSED[case]
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=reason) as caught:
        plan(model, layout, styles=styles)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_copies_of_heads_need_one_number_of_ranks() -> None:
    model = nn.ModuleDict({
        "layers": nn.ModuleList([
            GroupedDecoder(heads=8, key_heads=2), GroupedDecoder(heads=8, key_heads=1)
        ])
    })  # fmt: skip
    with pytest.raises(ValueError, match="gives 2 and 4 ranks the same heads"):
        plan(model, Layout(tp=4))


def test_plans_count_the_bytes_of_a_precision() -> None:
    model = GroupedDecoder(tied=False)
    wide, narrow = (
        plan(model, TP2, precision=each) for each in (None, Precision(parameters=torch.bfloat16))
    )
    assert str(narrow).splitlines()[0] == "GroupedDecoder with tp2, weights in bfloat16"
    item = torch.get_default_dtype().itemsize
    for rows in zip(str(wide).splitlines()[2:], str(narrow).splitlines()[2:], strict=True):
        numbers = [[int(each.replace(",", "")) for each in row.split()[-2:]] for row in rows]
        assert [2 * each for each in numbers[0]] == [item * each for each in numbers[1]]
    assert narrow.replace({}).precision == narrow.precision
    with pytest.raises(ValueError, match=r"precision: expected Precision\(\.\.\.\), .* got 'bf16'"):
        plan(model, TP2, precision="bf16")


def test_a_run_has_the_precision_of_its_plan() -> None:
    made = Precision(parameters=torch.bfloat16)
    found = plan(GroupedDecoder(), TP2, precision=made)
    assert planned_precision(found, None) == planned_precision(found, made) == made
    assert planned_precision(plan(GroupedDecoder(), TP2), made) == made
    with pytest.raises(ValueError, match="precision: expected that of the plan"):
        planned_precision(found, Precision(computation=torch.bfloat16))
