"""Measures the operators of a transformer on one GPU, to compare with the planner's constants.

The times are those of matrix products in bf16 and fp8, products grouped by expert, fused causal
attention, kernels between products, the optimizer, launches, and whole compiled layers. Operands
are random, because a GPU under load lowers its clock by an amount that depends on the data.

    python benchmarks/gpu_operators.py --json gpu.json        # about three minutes
"""

from __future__ import annotations

import itertools
import json
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

ROUND_S = 0.02
ROUNDS = 3
TOKENS = (1024, 2048, 4096, 8192, 16384)
# Columns and inner dimensions: Llama 3 8B and 70B whole and divided by 8, GPT-3 175B divided by 8,
# narrow products of small models and of low-rank attention.
WEIGHTS = (
    (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (1280, 8192),
    (8192, 1024), (7168, 8192), (8192, 3584), (4608, 12288), (6144, 12288), (12288, 6144),
    (2304, 768), (3072, 768), (768, 3072), (3072, 1024), (4096, 1024), (1536, 7168), (512, 7168),
    (128256, 4096),
)  # fmt: skip
EXPERTS = ((8, 14336, 4096), (128, 768, 2048), (64, 2048, 7168), (16, 2048, 7168), (32, 2880, 2880))
HEADS = ((32, 8, 128), (64, 8, 128), (12, 12, 128), (12, 12, 64), (128, 128, 192))
LAYERS = {  # hidden, heads, kv heads, head dim, ffn
    "Llama 3 8B": (4096, 32, 8, 128, 14336),
    "Llama 3 70B": (8192, 64, 8, 128, 28672),
    "1B": (2048, 16, 16, 128, 8192),
    "125M": (768, 12, 12, 64, 3072),
}

Row = dict[str, Any]


def seconds(call: Callable[[], object]) -> float:
    """Returns the median time of a call over some rounds of back-to-back calls."""
    for _ in range(3):
        call()
    once_s = max(_round_s(call, 3), 1e-7)
    count = max(3, min(2000, int(ROUND_S / once_s)))
    return median(_round_s(call, count) for _ in range(ROUNDS))


def _round_s(call: Callable[[], object], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def normal(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)


def products() -> Iterator[Row]:
    """Forward products and both gradients: x [rows, inner], w [columns, inner]."""
    for rows, (columns, inner) in itertools.product(TOKENS, WEIGHTS):
        if rows * columns > 2**30:
            continue
        x, w, g = normal(rows, inner), normal(columns, inner), normal(rows, columns)
        row = {"rows": rows, "columns": columns, "inner": inner, "precision": "bf16"}
        yield row | {
            "forward_s": seconds(lambda x=x, w=w: x @ w.T),
            "input_s": seconds(lambda g=g, w=w: g @ w),
            "weight_s": seconds(lambda g=g, x=x: g.T @ x),
        }


def narrow_products() -> Iterator[Row]:
    one = torch.ones((), device="cuda")
    for rows, (columns, inner) in itertools.product(TOKENS, WEIGHTS):
        if rows * columns > 2**30:
            continue
        x = normal(rows, inner).to(torch.float8_e4m3fn)
        w = normal(columns, inner).to(torch.float8_e4m3fn)

        def call(x: Tensor = x, w: Tensor = w) -> Tensor:
            return torch._scaled_mm(x, w.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

        row = {"rows": rows, "columns": columns, "inner": inner, "precision": "fp8"}
        yield row | {"forward_s": seconds(call)}


def grouped_products() -> Iterator[Row]:
    """Products of equal groups of rows with one matrix per expert."""
    for (experts, columns, inner), rows in itertools.product(EXPERTS, (8192, 32768, 65536)):
        x, w = normal(rows, inner), normal(experts, inner, columns)
        ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (rows // experts)
        row = {"experts": experts, "columns": columns, "inner": inner, "rows": rows}
        whole = w[0]
        yield row | {
            "grouped_s": seconds(lambda x=x, w=w, e=ends: torch._grouped_mm(x, w, offs=e)),
            "whole_s": seconds(lambda x=x, w=whole: x @ w),
        }


def attention() -> Iterator[Row]:
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    for (heads, kv, width), seq in itertools.product(HEADS, (2048, 4096, 8192, 32768)):
        batch = max(1, 8192 // seq)
        for backend in backends:
            row = {"heads": heads, "kv_heads": kv, "head_dim": width, "seq": seq, "batch": batch}
            try:
                yield (
                    row
                    | {"backend": backend.name}
                    | _attention(batch, heads, kv, width, seq, backend)
                )
            except RuntimeError as error:
                yield row | {"backend": backend.name, "error": str(error)[:200]}


def _attention(batch: int, heads: int, kv: int, width: int, seq: int, backend: Any) -> Row:
    q = normal(batch, heads, seq, width, grad=True)
    k, v = (normal(batch, heads, seq, width, grad=True) for _ in range(2))
    with sdpa_kernel(backend):
        run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
        out = run()
        g = torch.randn_like(out)
        both = seconds(lambda: torch.autograd.grad(run(), (q, k, v), g))
        with torch.no_grad():
            forward_s = seconds(run)
    return {"forward_s": forward_s, "backward_s": both - forward_s}


def between_products() -> Iterator[Row]:
    """Kernels bound by memory, with the bytes that they must move."""
    for tokens, width in itertools.product((2048, 8192), (4096, 14336)):
        x, y = normal(tokens, width), normal(tokens, width)
        n = tokens * width
        weight = normal(width)
        norm = torch.compile(lambda a, w: F.rms_norm(a, (a.shape[-1],), w))
        gate = torch.compile(lambda a, b: F.silu(a) * b)
        cases: list[tuple[str, int, Callable[[], object]]] = [
            ("add", 6 * n, lambda x=x, y=y: x + y),
            ("copy", 4 * n, lambda x=x: x.clone()),
            ("norm", 4 * n, lambda x=x, w=weight, norm=norm: norm(x, w)),
            ("gated activation", 6 * n, lambda x=x, y=y, gate=gate: gate(x, y)),
            ("conversion to fp8", 3 * n, lambda x=x: x.to(torch.float8_e4m3fn)),
        ]
        for name, nbytes, call in cases:
            yield {
                "name": name,
                "tokens": tokens,
                "width": width,
                "bytes": nbytes,
                "s": seconds(call),
            }


def updates() -> Iterator[Row]:
    parameters = [torch.randn(4096, 4096, device="cuda") for _ in range(30)]
    for each in parameters:
        each.grad = torch.randn_like(each)
    count = sum(each.numel() for each in parameters)
    for fused in (True, False):
        optimizer = torch.optim.AdamW(parameters, 1e-3, fused=fused, foreach=not fused)
        yield {"name": f"AdamW fused={fused}", "parameters": count, "s": seconds(optimizer.step)}
    yield {"name": "norm", "parameters": count,
           "s": seconds(lambda: nn.utils.clip_grad_norm_(parameters, 1.0))}  # fmt: skip


def launches() -> Iterator[Row]:
    x = torch.zeros(8, device="cuda")

    def chain() -> None:
        for _ in range(100):
            x.add_(1)

    yield {"name": "eager kernel", "s": seconds(chain) / 100}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    yield {"name": "kernel of a graph", "s": seconds(graph.replay) / 100}


class Layer(nn.Module):
    """A layer of the Llama architecture."""

    def __init__(self, hidden: int, heads: int, kv: int, width: int, ffn: int) -> None:
        super().__init__()
        self.sizes = heads, kv, width
        self.first, self.second = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv) * width, bias=False)
        self.out = nn.Linear(heads * width, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        heads, kv, width = self.sizes
        batch, seq, _ = x.shape
        q, k, v = self.qkv(self.first(x)).split([heads * width, kv * width, kv * width], -1)
        q, k, v = (each.view(batch, seq, -1, width).transpose(1, 2) for each in (q, k, v))
        q, k = _turned(q, turns), _turned(k, turns)
        k, v = (each.repeat_interleave(heads // kv, 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, -1))
        gate, up = self.up(self.second(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    cos, sin = turns.cos(), turns.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


def layers() -> Iterator[Row]:
    """Whole layers with the default choice of attention, compiled, forward and backward."""
    for name, sizes in LAYERS.items():
        layer = Layer(*sizes).cuda().bfloat16()
        count = sum(each.numel() for each in layer.parameters())
        for seq, batch in ((8192, 1), (8192, 2), (2048, 1), (2048, 8)):
            row = {"name": name, "seq": seq, "batch": batch, "parameters": count}
            yield row | _layer_times(layer, seq, batch, sizes)


def _layer_times(layer: Layer, seq: int, batch: int, sizes: Sequence[int]) -> Row:
    compiled = torch.compile(layer)
    turns = torch.randn(seq, sizes[3] // 2, device="cuda")
    x = normal(batch, seq, sizes[0], grad=True)
    g, values = torch.randn_like(x), (x, *layer.parameters())
    with torch.no_grad():
        forward_s = seconds(lambda: compiled(x, turns))
    both_s = seconds(lambda: torch.autograd.grad(compiled(x, turns), values, g))
    return {"forward_s": forward_s, "both_s": both_s}


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "products": products,
    "attention": attention,
    "between_products": between_products,
    "updates": updates,
    "launches": launches,
    "layers": layers,
    "grouped_products": grouped_products,
    "narrow_products": narrow_products,
}


def main(
    *,
    json_path: Annotated[Path, typer.Option("--json", help="File for all measurements.")],
) -> None:
    device = torch.cuda.get_device_properties(0)
    document: dict[str, Any] = {
        "device": device.name, "units": device.multi_processor_count,
        "memory_bytes": device.total_memory, "torch": torch.__version__,
        "host": platform.machine(),
    }  # fmt: skip
    for name, section in SECTIONS.items():
        begun_s = time.monotonic()
        rows: list[Row] = []
        document[name] = rows
        try:
            rows.extend(section())
        except Exception:
            document[f"{name} failed"] = traceback.format_exc()
        torch.cuda.empty_cache()
        json_path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"{name}: {len(rows)} rows in {time.monotonic() - begun_s:.1f} s", flush=True)


if __name__ == "__main__":
    typer.run(main)
