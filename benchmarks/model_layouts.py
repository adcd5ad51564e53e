"""Trains models of transformers in many layouts, and compares each with one process, in float64.

The models are tiny and random, from a configuration. Needs transformers and safetensors.

    python benchmarks/model_layouts.py                   # ten models on 2 and on 8 ranks
    python benchmarks/model_layouts.py --only GptOss
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from pages.model_layouts import render_model_layouts
from torch import distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

import unisono
from unisono.bench.machine_facts import describe_machine
from unisono.parallel import Layout, model_loss, parallelize

SAMPLES, POSITIONS, VOCAB, CLASSES, STEPS, CLIP = 8, 16, 61, 5, 5, 1.0
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCAB,
        "num_attention_heads": 4, "max_position_embeddings": 32}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: Mapping[str, dict[str, Any]] = {
    "LlamaForCausalLM": TEXT | GROUPED,
    "Qwen3ForCausalLM": TEXT | GROUPED,
    "Gemma3ForCausalLM": TEXT | GROUPED
    | {"sliding_window": 4, "query_pre_attn_scalar": 8, "num_hidden_layers": 6},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
                        "vocab_size": VOCAB, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
                        "embd_pdrop": 0.0},
    "BertForMaskedLM": TEXT | NO_DROPOUT,
    "ViTForImageClassification": {"hidden_size": 32, "intermediate_size": 48, "image_size": 8,
                                  "num_hidden_layers": 2, "num_attention_heads": 4,
                                  "patch_size": 4, "num_labels": CLASSES} | NO_DROPOUT,
    "MixtralForCausalLM": TEXT | GROUPED | EXPERTS | {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": TEXT | GROUPED | EXPERTS
    | {"num_experts": 4, "moe_intermediate_size": 12},
    "DeepseekV3ForCausalLM": TEXT | EXPERTS
    | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
       "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 8, "n_group": 2,
       "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 12},
    "GptOssForCausalLM": TEXT | GROUPED | EXPERTS
    | {"num_local_experts": 4, "sliding_window": 4},
}  # fmt: skip
CONFIGS = {"Gemma3ForCausalLM": "Gemma3TextConfig", "GPT2LMHeadModel": "GPT2Config"}
ALONE = ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2", "cp=2")
MIXTURES = ("dp=2,tp=2,pp=2,zero=1", "dp=2,tp=2,cp=2,zero=3", "pp=2,tp=2,cp=2")
OF_IMAGES = ("dp=2,tp=2,pp=2,zero=1", "dp=4,tp=2,zero=3", "dp=4,pp=2,zero=3")
"""The mixtures of a model whose positions `cp` cannot divide."""
MICROBATCHES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A training of a model in one process."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The largest errors of a layout, or the sentence with which all ranks refuse it."""

    model: str
    layout: str
    losses: float | None = None
    """Relative, as that of the norms of gradients."""
    norms: float | None = None
    weights: float | None = None
    """Absolute, of the exported weights."""
    refused: str = ""


class WithoutRoundings(TorchFunctionMode):
    """Leaves float64 as it is where a model converts to float32, which sums in another order would
    show."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options, name = kwargs or {}, getattr(func, "__name__", "")
        if name not in ("softmax", "to", "type", "float") or args[0].dtype != torch.float64:
            return func(*args, **options)
        if name == "softmax":
            return func(*args, **{key: each for key, each in options.items() if key != "dtype"})
        is_rounded = name == "float" or torch.float32 in (*args[1:], *options.values())
        return args[0] if is_rounded else func(*args, **options)


def layouts(model: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the layouts of a model on 2 and on 8 ranks."""
    if model.startswith("ViT"):
        return ALONE, OF_IMAGES
    if "experts_implementation" in MODELS[model]:
        return (*ALONE, "dp=2,ep=2"), tuple(f"{each},ep=2" for each in MIXTURES)
    return ALONE, MIXTURES


def a_model(name: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    config = CONFIGS.get(name, name.partition("For")[0] + "Config")
    made = getattr(transformers, config)(**MODELS[name])
    found: nn.Module = getattr(transformers, name)(made)
    return found.double().train()


def batches(name: str) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        if name.startswith("ViT"):
            images = torch.randn(SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64)
            labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
            yield {"pixel_values": images, "labels": labels}
            continue
        ids = torch.randint(0, VOCAB, (SAMPLES, POSITIONS), generator=generator)
        mask, labels = torch.ones_like(ids), ids.clone()
        mask[2, 11:], labels[2, 11:] = 0, -100
        labels[0, 3:], labels[5:, :4] = -100, -100
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


def alone(name: str) -> Training:
    """Trains a model in this process, without Unisono."""
    model = a_model(name)
    optimizer, losses, norms = adamw(model.parameters()), [], []
    with WithoutRoundings():
        for batch in batches(name):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            losses.append(float(loss.detach()))
    weights = {key: each.detach() for key, each in model.named_parameters()}
    return Training(losses=losses, norms=norms, weights=weights)


def divided(name: str, text: str, expected: Training) -> Row:
    """Trains a model in a layout. Runs on every rank."""
    data, layout = list(batches(name)), Layout.parse(text)
    run, row, refused = None, Row(model=name, layout=text), ""
    try:
        with WithoutRoundings():
            run = parallelize(
                a_model(name), layout, loss=model_loss, optimizer=adamw, clip=CLIP,
                microbatches=MICROBATCHES, example=data[0] if layout.pp > 1 else None,
            )  # fmt: skip
            found = [(float(run.step(batch)), run.gradient_norm) for batch in data]
        losses, norms = zip(*found, strict=True)
        row = Row(
            model=name,
            layout=text,
            losses=_relative(losses, expected.losses),
            norms=_relative(norms, expected.norms),
            weights=_of_weights(run, expected.weights),
        )
    except (ValueError, RuntimeError) as error:
        refused = str(error)
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, refused)
    if any(texts):
        if not all(texts) or "\n" in refused:
            raise AssertionError(f"{name} in {text}: not all ranks refuse it in one line: {texts}")
        row = Row(model=name, layout=text, refused=texts[0])
    if run is not None:
        run.mesh.close()
    return row


def _relative(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))


def _of_weights(run: Any, expected: Mapping[str, torch.Tensor]) -> float:
    """Returns the largest error of exported weights."""
    from safetensors.torch import load_file

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    run.export(folder[0])
    found: dict[str, torch.Tensor] = {}
    for path in Path(folder[0]).glob("*.safetensors"):
        found |= load_file(path)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return max(float((found[name] - each).abs().max()) for name, each in expected.items())


def measure(cases: Sequence[tuple[str, str]], expected: Mapping[str, Training]) -> list[Row]:
    """Trains all cases. Runs on every rank."""
    torch.set_num_threads(1)
    dist.init_process_group("unisono")
    rows = []
    for name, text in cases:
        rows.append(divided(name, text, expected[name]))
        if dist.get_rank() == 0:
            print(rows[-1], flush=True)
    dist.destroy_process_group()
    return rows


def main(
    *,
    only: Annotated[str, typer.Option(help="Train models with this text in their names.")] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="File for all results.")] = None,
) -> None:
    names = [name for name in MODELS if only in name]
    expected = {name: alone(name) for name in names}
    rows: list[Row] = []
    for place, ranks in enumerate((2, 8)):
        cases = [(name, text) for name in names for text in layouts(name)[place]]
        rows += unisono.run(measure, ranks=ranks, args=(cases, expected))[0]
    rows.sort(key=lambda row: names.index(row.model))
    document = {
        "machine": describe_machine(),
        "transformers": metadata.version("transformers"),
        "rows": [asdict(row) for row in rows],
    }
    print("\n".join(render_model_layouts(document)))
    if json_path:
        json_path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
