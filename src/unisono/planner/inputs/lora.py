"""Adapters of low rank (LoRA), which a step trains while it keeps all other weights (Hu et al.,
arXiv 2106.09685).

An adapter of a matrix [out, in] has two matrices, [rank, in] and [out, rank]. The weight itself has
no gradient and no optimizer states, so backward computes only the gradients of inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from unisono.planner.inputs.transformer import Transformer

_FORM = re.compile(r"lora:([1-9]\d*)(?::(attention|all))?")


class Adapter(NamedTuple):
    """Widths of the input and the output of an adapted matrix, and which of them `tp` divides."""

    inputs: int
    outputs: int
    divides_outputs: bool


class Lora(NamedTuple):
    """Adapters of a rank, on all linear layers or on those of attention."""

    rank: int
    attention_only: bool

    @classmethod
    def of(cls, trainable: str) -> Lora | None:
        """Returns the adapters of a text; None for "all". Raises ValueError for other texts.

        >>> Lora.of("lora:16"), Lora.of("all")
        (Lora(rank=16, attention_only=False), None)
        """
        if trainable == "all":
            return None
        found = _FORM.fullmatch(trainable)
        if not found:
            raise ValueError(
                f"trainable must be all, lora:RANK or lora:RANK:attention, not {trainable!r}"
            )
        return cls(int(found[1]), found[2] == "attention")

    def check(self, model: Transformer) -> None:
        """Raises ValueError for a model whose adapters are not known."""
        if model.kv_rank:
            raise ValueError("LoRA on latent attention is not modelled; trainable = all works")
        if model.experts and not self.attention_only:
            raise ValueError(
                f"LoRA on experts is not modelled; trainable = lora:{self.rank}:attention works"
            )

    def adapters(self, model: Transformer) -> Iterator[Adapter]:
        """Yields the adapters of a layer."""
        h, keys = model.hidden, model.key_value_width // 2
        for width in (model.query_width, keys, keys):
            yield Adapter(h, width, True)
        yield Adapter(model.heads * model.head_dim, h, False)
        if not self.attention_only:
            for _ in range(model.matrices - 1):
                yield Adapter(h, model.ffn, True)
            yield Adapter(model.ffn, h, False)

    def layer_parameters(self, model: Transformer, tp: int) -> float:
        """Returns the parameters of a layer's adapters on one device.

        >>> llama = Transformer(
        ...     layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=True, vocab=9)
        >>> 32 * Lora(16, False).layer_parameters(llama, 1)  # as peft prints it
        41943040.0
        """
        found = 0.0
        for each in self.adapters(model):
            inputs, outputs = divided(each, tp)
            found += self.rank * (inputs + outputs)
        return found


def divided(adapter: Adapter, tp: int) -> tuple[float, float]:
    """Returns the widths of an adapter's input and output on one of `tp` ranks."""
    if adapter.divides_outputs:
        return adapter.inputs, adapter.outputs / tp
    return adapter.inputs / tp, adapter.outputs
