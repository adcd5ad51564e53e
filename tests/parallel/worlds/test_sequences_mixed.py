"""Context parallelism with tensor parallelism by a plan and with pipelines, of models that know
nothing of a layout: equal to one process, or refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cases_in_turn import turn
from parallel.worlds.layout_training import compare_weights
from parallel.worlds.planned_models import FusedDecoder, GroupedDecoder
from parallel.worlds.sequence_models import (
    POSITIONS,
    STYLES,
    VOCAB,
    WIDTH,
    Attention,
    Decoder,
    adamw,
    compare_sequences,
    token_batches,
)
from parallel.worlds.test_sequences_4 import refused
from unisono.parallel import CrossEntropy, Layout, Precision, model_loss, parallelize
from unisono.parallel.run import ParallelRun

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
TENSOR, PIPELINE = "cp=2,tp=2", "cp=2,pp=2"


def test_sequences_mixed(outcome):
    outcome.require_success()


def compare(text: str, kind: str, **options: Any) -> None:
    """Compares a decoder with its own loss, of masked or packed samples if it has such a kind."""
    batches = token_batches(masked=kind in ("full", "window"), packed=kind == "packed")
    model = options.pop("model", {})
    if "tp=" in text:
        options = {"styles": STYLES} | options
    if "pp=" in text:
        options |= {"example": batches[0]}

    def check(run: Any, _: nn.Module) -> None:
        """Compares predicted bytes, which do not count passes that run again."""
        report = run.report()
        for axis in {"tp", "pp", "shard"} & {*report.bytes_sent}:
            sent, predicted = report.bytes_sent[axis], report.predicted.bytes_sent[axis]
            assert sent == predicted, (axis, sent, predicted)

    compare_sequences(
        text, partial(Decoder, kind, **model), batches, microbatches=3,
        check=None if "checkpoints" in model else check, **options,
    )  # fmt: skip


def own_heads_and_positions(world):
    torch.set_default_dtype(torch.float64)
    for kind in ("rotary", "full", "window"):
        with turn(kind=kind):
            compare(TENSOR, kind)
    compare(TENSOR, "learned", model={"is_eager": True})
    other = {"tokens": "embedding_colwise", "wide": "colwise_gather_output",
             "narrow": "rowwise_split_input"}  # fmt: skip
    compare(TENSOR, "rotary", styles=STYLES | other)


def own_heads_and_positions_again(world):
    """Tests parts of the forward pass that run again in the backward pass."""
    torch.set_default_dtype(torch.float64)
    for text in (TENSOR, PIPELINE, f"{PIPELINE},zero=3", f"{PIPELINE},schedule=zbv"):
        with turn(text=text):
            layers = {"layers": 4} if "zbv" in text else {}
            compare(text, "rotary", model={"checkpoints": False} | layers)


def own_blocks_and_positions(world):
    torch.set_default_dtype(torch.float64)
    for kind in ("learned", "packed"):
        with turn(kind=kind):
            compare(PIPELINE, kind)
    compare(f"{PIPELINE},vpp=2", "window", model={"layers": 4})
    compare(PIPELINE, "rotary", model={"has_experts": True})


class Chooser(nn.Module):
    """Chooses rows by values, which only a module that is not watched may do."""

    is_per_position = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, WIDTH)
        chosen, found = rows.detach().sum(-1) > 0, rows.clone()
        found[chosen] = rows[chosen] * self.weight
        return found.view(x.shape)


def own_choices_before_the_blocks(world):
    """Tests that a module whose stand-in in later stages has no weights is not watched there."""
    torch.set_default_dtype(torch.float64)
    batches = token_batches()

    def make() -> nn.Module:
        model = Decoder("rotary")
        model.tokens = nn.Sequential(model.tokens, Chooser())
        return model

    compare_sequences(PIPELINE, make, batches, microbatches=3, example=batches[0])


def own_blocks_without_a_graph(world):
    """Tests a model that asks for values of tensors, which torch.export cannot trace."""
    torch.set_default_dtype(torch.float64)
    compare("dp=2,pp=2,zero=1", "learned", model={"has_experts": True})


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(each["input_ids"], each["labels"]) for each in token_batches()]


def compare_pairs(text: str, make: Any, **options: Any) -> None:
    """Compares a model of tokens with a loss of its logits."""
    compare_sequences(
        text, make, pairs(), loss=CrossEntropy(VOCAB), microbatches=3,
        alone=lambda model, pair: CrossEntropy()(model(pair[0]), pair[1]),
        passed=lambda _, pair: pair, **options,
    )  # fmt: skip


def own_plans_of_models(world):
    """Tests norms of heads, heads of keys that ranks share, fused layers and tied tables."""
    torch.set_default_dtype(torch.float64)
    compare_pairs(PIPELINE, GroupedDecoder, example=pairs()[0][0])
    compare_pairs(TENSOR, GroupedDecoder)
    compare_pairs(TENSOR, partial(GroupedDecoder, key_heads=1, tied=False, bias=False))
    compare_pairs(TENSOR, FusedDecoder, styles=FusedDecoder.styles)


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, None, None, True)


def a_sequence() -> nn.Sequential:
    """Plain modules in a sequence, two of which mix positions."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Embedding(VOCAB, WIDTH), Causal(), nn.Linear(WIDTH, 20), nn.GELU(),
        nn.Linear(20, WIDTH), Causal(), nn.Linear(WIDTH, VOCAB),
    )  # fmt: skip


class Biased(nn.Module):
    """The first of modules that pass a whole tensor with a gradient beside a divided one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.bias = nn.Parameter(torch.randn(POSITIONS, POSITIONS))

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens(tokens), self.bias.tril() * 2


class Later(Causal):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, bias = pair
        return x + self.attention(x, None, bias, False), bias


class Ending(nn.Linear):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return super().forward(pair[0])


def own_whole_tensors_between_stages(world):
    torch.set_default_dtype(torch.float64)

    def make() -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(Biased(), Later(), Later(), Ending(WIDTH, VOCAB))

    for text in (PIPELINE, f"{PIPELINE},zero=3", f"{PIPELINE},schedule=zbv"):
        with turn(text=text):
            compare_pairs(text, make)


def own_calls_of_models(world):
    """Tests a function that calls the model, and a batch in which some ranks have no labels."""
    torch.set_default_dtype(torch.float64)

    def call(model: nn.Module, batch: Any) -> torch.Tensor:
        assert model.kind == "learned"
        logits: torch.Tensor = model(batch["input_ids"]).logits
        return logits

    def loss(logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    batches = token_batches()
    for each in batches:
        each["labels"][:, 3:] = -100
    for text in (TENSOR, PIPELINE, f"{PIPELINE},zero=2"):
        options = {"styles": STYLES} if text == TENSOR else {"example": batches[0]}
        with turn(text=text):
            compare_sequences(
                text, partial(Decoder, "learned"), batches, call=call, loss=loss, microbatches=3,
                alone=lambda model, batch: loss(call(model, batch), batch), **options,
            )  # fmt: skip
    compare_sequences(
        PIPELINE, partial(Decoder, "rotary"), batches, microbatches=3, example=batches[0]
    )


def own_local_batches(world):
    """Tests that one of the ranks with the same samples passes them."""
    torch.set_default_dtype(torch.float64)
    batches = token_batches()
    for text in (TENSOR, PIPELINE):
        options = {"styles": STYLES} if text == TENSOR else {"example": batches[0]}
        with turn(text=text):
            compare_sequences(
                text, partial(Decoder, "rotary"), batches, microbatches=3, batch="local",
                passed=lambda run, batch: (batch if run.mesh.rank == 3 else None,), **options,
            )  # fmt: skip


def own_checkpoints_of_other_layouts(world):
    torch.set_default_dtype(torch.float64)
    batches, folder = token_batches(), world.folder / "mixed"

    def go_on(run: ParallelRun, whole: nn.Module) -> None:
        run.save(folder)
        for text, options in (
            (f"{PIPELINE},zero=3", {"example": batches[0], "microbatches": 2}),
            (f"{TENSOR},zero=3", {"styles": STYLES}),
        ):
            other = parallelize(
                Decoder("rotary"), Layout.parse(text), loss=model_loss, optimizer=adamw, clip=0.5,
                **options,
            )  # fmt: skip
            other.load(folder)
            compare_weights(other, whole, Decoder("rotary"), tolerance=1e-9)
            other.mesh.close()

    compare_sequences(TENSOR, partial(Decoder, "rotary"), batches, check=go_on, styles=STYLES)


def own_precision(world):
    """Tests bfloat16 over float32, near one process in float32."""
    torch.set_default_dtype(torch.float32)
    batch = token_batches()[0]
    alone = float(Decoder("window")(**batch).loss)
    for text in (TENSOR, f"{PIPELINE},zero=3"):
        options = {"styles": STYLES} if text == TENSOR else {"example": batch}
        with turn(text=text):
            run = parallelize(
                Decoder("window", checkpoints=False), Layout.parse(text), loss=model_loss,
                optimizer=adamw, microbatches=3, precision=Precision(computation=torch.bfloat16),
                **options,
            )  # fmt: skip
            assert float(run.step(batch)) == pytest.approx(alone, rel=0.02)
            run.mesh.close()


def own_sequences_of_modules(world):
    torch.set_default_dtype(torch.float64)
    for text in (TENSOR, PIPELINE, f"{PIPELINE},schedule=zb1p"):
        with turn(text=text):
            compare_pairs(text, a_sequence)


class Summed(Decoder):
    """Combines positions in its last block."""

    def __init__(self) -> None:
        super().__init__("rotary")
        self.layers[1].routed = Cumulative()


class Cumulative(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)


class CumulativeInTraining(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1) if self.training else x


def own_refusals_of_one_stage(world):
    """Tests that all ranks learn what only the ranks of one stage can refuse."""
    torch.set_default_dtype(torch.float64)
    batch = token_batches()[0]
    for number in (0, 1):
        model = Decoder("rotary")
        model.layers[number].routed = CumulativeInTraining()
        run = parallelize(
            model, Layout.parse(PIPELINE), loss=model_loss, optimizer=adamw, microbatches=3,
            example=batch,
        )  # fmt: skip
        match = f"layers.{number}.routed .CumulativeInTraining.: cumsum works along the positions"
        with pytest.raises((ValueError, RuntimeError), match=match) as caught:
            run.step(batch)
        assert "\n" not in str(caught.value)
        run.mesh.close()


def own_refusals(world):
    torch.set_default_dtype(torch.float64)
    batch = token_batches()[0]

    def runs(model: nn.Module, text: str, **options: Any) -> Any:
        return lambda: parallelize(
            model, Layout.parse(text), optimizer=adamw, loss=model_loss,
            microbatches=3, **options,
        )  # fmt: skip

    for text in (TENSOR, PIPELINE):
        options = {"styles": STYLES} if text == TENSOR else {"example": batch}
        match = "layers.1.routed .Cumulative.: cumsum works along the positions, .* dp in place of"
        with turn(text=text):
            refused(runs(Summed(), text, **options), match, batch)
    blocks = "with cp = 2 cuts a model between its repeated blocks, but "
    one = Decoder("rotary", layers=1)
    refused(
        runs(one, PIPELINE, example=batch),
        f"{blocks}Decoder calls layers.0.attention between",
        batch,
    )
    refused(
        runs(Decoder("rotary", layers=2), "cp=2,pp=2,vpp=2", example=batch),
        "has 2 blocks for 4 stages; pp = 2 without cp = 2, or pp = 1, works",
        batch,
    )
    refused(runs(Decoder("rotary"), PIPELINE), "needs an example|example=inputs", batch)
    odd = {name: each[:, 1:] for name, each in batch.items()}
    refused(
        runs(Decoder("rotary"), PIPELINE, example=odd),
        "got 15; the nearest is 16; cp = 2 takes dimension 1 of .2, 15. for positions; dp = 2 w",
        batch,
    )
    refused(runs(Decoder("rotary"), "cp=2,tp=2,sequence_parallel=1", styles=STYLES), "works", batch)
