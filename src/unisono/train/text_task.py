"""A text task: the bytes of Python's standard library, and a small decoder-only transformer."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

BYTES = 256
CONTEXT = 128
WIDTH = 128
HEADS = 4
BLOCKS = 2
KERNEL_SIZE = 4
_CORPUS_MAX_BYTES = 4_000_000
_HELD_OUT_EVERY = 20
_SCORED_WINDOWS = 64
_PROMPT = b"def "
_SAMPLE_BYTES = 400
_SAMPLE_TEMPERATURE = 0.7


class Attention(nn.Module):
    """Causal self-attention over (batch, time, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, _ = x.shape
        heads = self.query_key_value(x).view(batch, time, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(batch, time, WIDTH)
        output: torch.Tensor = self.output(mixed)
        return output


class CausalConvolution(nn.Module):
    """A convolution of each byte with the three bytes before it, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, KERNEL_SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past_only = functional.pad(x.transpose(1, 2), (KERNEL_SIZE - 1, 0))
        output: torch.Tensor = x + self.mix(past_only).transpose(1, 2)
        return output


class TransformerBlock(nn.Module):
    """A block of attention and a two-layer network, each after a norm, with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        attention, last = Attention(), nn.Linear(4 * WIDTH, WIDTH)
        # A new block returns its input, so that the first steps already reduce the loss.
        for layer in (attention.output, last):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.attention = nn.Sequential(nn.LayerNorm(WIDTH), attention)
        self.network = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), last
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        output: torch.Tensor = x + self.network(x)
        return output


class Decoder(nn.Module):
    """Maps bytes (batch, time) to the logits (batch, time, 256) of each byte's successor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(
            CausalConvolution(), *(TransformerBlock() for _ in range(BLOCKS))
        )
        last = nn.Linear(WIDTH, BYTES)
        nn.init.zeros_(last.weight)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), last)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text) + self.position[: text.shape[1]]
        logits: torch.Tensor = self.head(self.blocks(x))
        return logits


@dataclass(frozen=True, slots=True)
class TextTask:
    """A task of windows of 129 bytes; every twentieth window is held out for the score."""

    train_set: TensorDataset
    held_out: torch.Tensor

    @staticmethod
    def load() -> TextTask:
        """Reads the standard library of the running Python."""
        return TextTask.of(_library_source(Path(sysconfig.get_path("stdlib"))))

    @staticmethod
    def of(source: bytes) -> TextTask:
        """Returns a task on the text `source`. Raises `ValueError` for fewer than 20 windows."""
        windows = _windows(source, CONTEXT)
        count = len(windows)
        if count < _HELD_OUT_EVERY:
            raise ValueError(
                f"expected at least {_HELD_OUT_EVERY * CONTEXT + 1} bytes, not {len(source)}"
            )
        is_held_out = torch.arange(count) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
        scored = windows[is_held_out]
        scored = scored[:: max(1, len(scored) // _SCORED_WINDOWS)]
        return TextTask(TensorDataset(windows[~is_held_out]), scored)

    def model(self) -> nn.Module:
        """Returns a transformer of 545 thousand parameters."""
        return Decoder()

    def optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )

    def loss(self, model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        (windows,) = batch
        return _bits_per_byte(model, windows)

    def score(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, float]:
        """Returns (bits, bytes) for this rank's share of the held-out windows."""
        windows = self.held_out[rank::ranks]
        if len(windows) == 0:
            return 0.0, 0.0
        count = len(windows) * CONTEXT
        return float(_bits_per_byte(model, windows)) * count, float(count)

    def sample(self, model: nn.Module) -> str:
        """Returns text that the model generates, which resembles Python code."""
        generator = torch.Generator().manual_seed(0)
        text = torch.tensor([list(_PROMPT)])
        for _ in range(_SAMPLE_BYTES):
            logits = model(text[:, -CONTEXT:])[0, -1] / _SAMPLE_TEMPERATURE
            successor = torch.multinomial(logits.softmax(dim=0), 1, generator=generator)
            text = torch.cat([text, successor.unsqueeze(0)], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


def _bits_per_byte(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    logits = model(windows[:, :-1])
    nats = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    return nats / math.log(2)


def library_windows(length: int) -> torch.Tensor:
    """Returns the standard library's source as integers, in windows of `length + 1` bytes.

    Each window begins with the last byte of the previous window.
    """
    return _windows(_library_source(Path(sysconfig.get_path("stdlib"))), length)


def _windows(source: bytes, length: int) -> torch.Tensor:
    everything = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    count = (len(source) - 1) // length
    if count < 1:
        return torch.empty(0, length + 1, dtype=torch.long)
    return everything[: count * length + 1].unfold(0, length + 1, length).long()


def _library_source(folder: Path) -> bytes:
    """Returns the library's top-level modules in alphabetical order, up to the size limit."""
    source = bytearray()
    for path in sorted(folder.glob("*.py")):
        source += path.read_bytes()
        if len(source) >= _CORPUS_MAX_BYTES:
            break
    return bytes(source[:_CORPUS_MAX_BYTES])
