"""Functions of torch on tensors that are divided by positions: the part of the whole result, or an
error."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from unisono.parallel.context import ContextAttention  # noqa: E402
from unisono.parallel.positions import (  # noqa: E402
    DividedPositions,
    SequencePart,
    placement_of,
)

pytestmark = pytest.mark.torch
SAMPLES, LENGTH, WIDTH = 3, 8, 6
TABLE = torch.randn(11, WIDTH, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(0, 11, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(2))
VECTOR, MATRIX = torch.linspace(-1, 1, WIDTH), torch.linspace(-1, 1, 24).reshape(WIDTH, 4)
OF_POSITIONS = torch.linspace(0.5, 2, LENGTH * WIDTH).reshape(LENGTH, WIDTH)
MASK = torch.arange(SAMPLES * LENGTH).reshape(SAMPLES, LENGTH) % 3 > 0


def written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[..., 1:3] = OF_POSITIONS[:, :2]
    y[:, :, 0] = 7.0
    y[0] = x[1]
    return y


SAME: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scale": lambda x: 2 * x / 3 - 1,
    "operators": lambda x: (-x + 1 - x * x).__rpow__(2.0) // 1 + abs(x) ** 2,
    "comparison": lambda x: (x > 0) & ~(x == 1) | x.isnan(),
    "vector": lambda x: x * VECTOR + VECTOR,
    "positions": lambda x: x + OF_POSITIONS,
    "positions first": lambda x: OF_POSITIONS.exp() * x,
    "positions of samples": lambda x: torch.where(MASK.unsqueeze(-1), x, torch.zeros(())),
    "masked": lambda x: x.masked_fill(~MASK[:, :, None], -3.0),
    "arange": lambda x: x * torch.arange(x.size(1))[None, :, None],
    "column of positions": lambda x: x + torch.arange(x.shape[1], dtype=x.dtype).view(1, -1, 1),
    "lookup of positions": lambda x: x + functional.embedding(torch.arange(LENGTH), TABLE),
    "in place": lambda x: x.clone().add_(OF_POSITIONS).mul_(2),
    "operator in place": lambda x: operator.iadd(x.clone(), OF_POSITIONS),
    "linear": lambda x: functional.linear(x, MATRIX.T),
    "matmul": lambda x: x @ MATRIX,
    "samples of matrices": lambda x: torch.matmul(x, MATRIX.expand(SAMPLES, -1, -1)),
    "product of columns": lambda x: (MATRIX.T @ x.transpose(1, 2)).mT,
    "heads": lambda x: x.view(SAMPLES, LENGTH, 2, 3).transpose(1, 2).contiguous().flatten(0, 1),
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": lambda x: functional.silu(x) * x.sigmoid(),
    "softmax": lambda x: x.softmax(-1) + functional.log_softmax(x, dim=2),
    "layer norm": lambda x: functional.layer_norm(x, (WIDTH,), VECTOR),
    "rms norm": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "variance": lambda x: x.var(-1, keepdim=True, unbiased=False) + torch.std(x, -1, True, True),
    "sums": lambda x: x.sum(-1) + x.amax(dim=-1) + torch.norm(x, 2, -1) + x.max(-1).values,
    "sum of samples": lambda x: x.sum(0) + x.mean((0, 2), keepdim=True)[0],
    "larger": lambda x: torch.max(x, OF_POSITIONS) + torch.clamp(x, OF_POSITIONS * 0, OF_POSITIONS),
    "rows": lambda x: x.view(-1, WIDTH),
    "rows and back": lambda x: (x.reshape(-1, WIDTH) @ MATRIX).view(*x.shape[:-1], 4),
    "rows of positions": lambda x: x.flatten(0, 1) + OF_POSITIONS.repeat(SAMPLES, 1),
    "columns": lambda x: x.flatten(1) * OF_POSITIONS.flatten(),
    "addmm": lambda x: torch.addmm(VECTOR[:4], x.view(-1, x.size(-1)), MATRIX),
    "halves": lambda x: torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), dim=-1),
    "index": lambda x: x[:, :, None, 1] + x[0][None, ..., :1].squeeze(0) + x[:, 0:][1:2, ..., 2:3],
    "list": lambda x: x.view(SAMPLES, LENGTH, 2, 3)[..., [1, 0, 1], 1:],
    "chunks": lambda x: torch.cat(x.chunk(3, -1)[::-1], -1) + x.unflatten(-1, (2, -1)).flatten(2),
    "split": lambda x: operator.add(*x.split(3, dim=2)) + x.unbind(-1)[1].unsqueeze(-1),
    "stack": lambda x: torch.stack((x, OF_POSITIONS.expand_as(x)), dim=1),
    "joined with positions": lambda x: torch.cat([x, OF_POSITIONS.expand(SAMPLES, -1, -1)], -1),
    "repeated heads": lambda x: x[:, None].expand(SAMPLES, 4, LENGTH, WIDTH).reshape(-1, LENGTH, 6),
    "repeats": lambda x: x.repeat(1, 1, 2).repeat_interleave(2, dim=0).permute(2, 0, 1),
    "types": lambda x: x.double().to(torch.float32).type_as(TABLE).detach(),
    "sizes": lambda x: x * x.numel() + len(x) + x.shape[1] + x.size()[1] + x.nelement(),
    "padded features": lambda x: functional.pad(x, (1, 2)),
    "normalized": lambda x: functional.normalize(x, dim=-1),
    "top": lambda x: x.topk(2)[0] + x.sort(-1).values[..., :2],
    "losses of positions": lambda x: functional.cross_entropy(
        x.transpose(1, 2), IDS % WIDTH, reduction="none"
    ),
    "gathered features": lambda x: x.gather(-1, x.argsort(-1)[..., :2]),
    "scattered features": lambda x: torch.zeros_like(x).scatter(2, x.topk(2, -1)[1], 1.0),
    "classes": lambda x: functional.one_hot(x.argmax(-1), WIDTH) * x,
    "written": written,
    "copied": lambda x: x.new_empty(SAMPLES, LENGTH, 2).copy_(x[..., :2]) + x.new_full((), 2.0),
    "full": lambda x: x.new_full(x.shape[:2], 3.0) + x.new_ones(*x.shape).sum(-1),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (3, 2))) * 1j),
    "zeros": lambda x: torch.zeros_like(x) + x.new_zeros(x.shape) + torch.ones(x.shape),
}  # fmt: skip

COMBINING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "convolution": lambda x: functional.conv1d(x.mT, torch.ones(4, WIDTH, 3), padding=1),
    "cumsum": lambda x: x.cumsum(1),
    "mean": lambda x: x.mean(1),
    "mean of all": lambda x: x.mean(),
    "pooling": lambda x: functional.avg_pool1d(x.mT, 2),
    "first": lambda x: x[:, 0],
    "shift": lambda x: x[:, 1:] - x[:, :-1],
    "steps": lambda x: x[:, ::2],
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "mask": lambda x: x[MASK],
    "gather": lambda x: x.gather(1, torch.zeros(SAMPLES, 1, WIDTH, dtype=torch.int64)),
    "softmax over positions": lambda x: x.softmax(1),
    "softmax of all": lambda x: x.norm(),
    "scores": lambda x: x @ x.mT,
    "sum by a matrix": lambda x: torch.ones(SAMPLES, 2, LENGTH) @ x,
    "weights from positions": lambda x: functional.linear(TABLE, x[0]),
    "split": lambda x: x.chunk(2, 1)[0],
    "appended": lambda x: torch.cat([x, x], 1),
    "padded": lambda x: functional.pad(x, (0, 0, 1, 0)),
    "reshaped": lambda x: x.reshape(SAMPLES, 2, -1),
    "batch norm": lambda x: functional.batch_norm(x.mT, None, None, training=True),
    "norm of positions": lambda x: functional.layer_norm(x, (LENGTH, WIDTH)),
    "other positions": lambda x: x.unsqueeze(1) + x.unsqueeze(2),
    "values": lambda x: x * float(x.detach().sum()),
    "list": lambda x: torch.tensor(x.tolist()),
    "data": lambda x: x.data * 2,
    "written": lambda x: torch.zeros(x.shape).add_(x),
    "copied": lambda x: torch.zeros(x.shape).copy_(x),
    "einsum": lambda x: torch.einsum("bth,buh->btu", x, x),
    "classes of a part": lambda x: functional.one_hot(x.argmax(-1)),
    "written position": lambda x: operator.setitem(x.clone(), (slice(None), 0), 1.0),
    "written into a whole": lambda x: operator.setitem(torch.zeros(x.shape), ..., x),
    "mean loss": lambda x: functional.cross_entropy(x.view(-1, WIDTH), IDS.view(-1) % WIDTH),
    "unknown positions": lambda x: x + torch.ones(SAMPLES, LENGTH // 2, WIDTH),
}


class Called(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.function(functional.embedding(ids, TABLE))


def divided(function, rank: int, *, compiles: bool = False) -> tuple[torch.Tensor, SequencePart]:
    part, model = SequencePart(length=LENGTH, rank=rank, ranks=2), Called(function)
    called = torch.compile(model, backend="eager") if compiles else model
    attention = ContextAttention("ring", None)
    with DividedPositions(part, attention, model, owns_loss=False, placed=None):
        return called(IDS), part


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_function_of_single_positions_returns_its_part(name: str, rank: int) -> None:
    whole = Called(SAME[name])(IDS)
    found, part = divided(SAME[name], rank)
    placement = placement_of(found)
    assert placement is not None
    assert part.shape(found, placement) == whole.shape
    torch.testing.assert_close(found, part.of(whole, placement), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", COMBINING)
def test_a_function_that_combines_positions_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)the model \(Called\): .*cp = 2 divides") as caught:
        divided(COMBINING[name], 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["heads", "positions", "rows and back"])
def test_a_compiled_model_returns_its_part(name: str) -> None:
    whole = Called(SAME[name])(IDS)
    found, part = divided(SAME[name], 1, compiles=True)
    placement = placement_of(found)
    assert placement is not None
    torch.testing.assert_close(found, part.of(whole, placement), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["cumsum", "first", "mean"])
def test_a_compiled_model_that_combines_positions_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cp = 2 divides"):
        divided(COMBINING[name], 1, compiles=True)


def test_shapes_are_those_of_whole_sequences() -> None:
    def check(x: torch.Tensor) -> torch.Tensor:
        assert x.shape == x.size() == (SAMPLES, LENGTH, WIDTH)
        assert (x.size(1), x.size(dim=-2), x.dim(), x.ndim) == (LENGTH, LENGTH, 3, 3)
        assert x.numel() == SAMPLES * LENGTH * WIDTH
        assert x.view(-1, WIDTH).shape[0] == SAMPLES * LENGTH
        return x

    found, _ = divided(check, 0)
    assert found.shape == (SAMPLES, LENGTH // 2, WIDTH)
