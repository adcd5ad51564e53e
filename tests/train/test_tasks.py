from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from unisono.train import text_task as text  # noqa: E402
from unisono.train.digits_task import Digits  # noqa: E402
from unisono.train.task import Task  # noqa: E402
from unisono.train.text_task import TextTask  # noqa: E402

pytestmark = pytest.mark.torch

SOURCE = b"def add(left, right):\n    return left + right\n\n\n" * 200


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Limits torch to one thread. With more threads than free cores, these small models run many
    times slower.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["digits", "text"])
def task(request: pytest.FixtureRequest) -> Task:
    return Digits.load() if request.param == "digits" else TextTask.of(SOURCE)


def first_batch(task: Task) -> tuple[torch.Tensor, ...]:
    return task.train_set[:8]


def test_digits_are_split_without_overlap() -> None:
    task = Digits.load()
    images, labels = task.train_set.tensors
    assert images.shape == (1437, 1, 8, 8)
    assert task.test_images.shape == (360, 1, 8, 8)
    assert images.min() == -1 and images.max() == 1
    # Every class has about the same share of the test images.
    assert torch.bincount(task.test_labels).min() >= 34
    assert len(labels) + len(task.test_labels) == 1797


def test_every_twentieth_text_window_is_held_out() -> None:
    task = TextTask.of(SOURCE)
    (windows,) = task.train_set.tensors
    count = (len(SOURCE) - 1) // text.CONTEXT
    assert windows.shape[1] == text.CONTEXT + 1
    assert len(windows) + len(task.held_out) == count
    assert bytes(windows[0].tolist()) == SOURCE[: text.CONTEXT + 1]


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least"):
        TextTask.of(b"short")


def test_the_decoder_does_not_see_the_future() -> None:
    torch.manual_seed(0)
    model = text.Decoder().eval()
    # some parameters begin as zeros, which would hide an error
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    one = torch.randint(0, text.BYTES, (1, 16))
    other = one.clone()
    other[0, 10:] = (other[0, 10:] + 1) % text.BYTES
    with torch.no_grad():
        before, after = model(one), model(other)
    torch.testing.assert_close(before[0, :10], after[0, :10])
    assert not torch.allclose(before[0, 10:], after[0, 10:])


def test_gradients_are_not_small(task: Task) -> None:
    size_bytes = 4 * sum(parameter.numel() for parameter in task.model().parameters())
    assert 400_000 <= size_bytes <= 4_000_000


def test_a_few_steps_lower_the_loss(task: Task) -> None:
    torch.manual_seed(0)
    model, batch = task.model(), first_batch(task)
    optimizer = task.optimizer(model, 1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_shares_of_the_score_add_up_to_the_whole(task: Task) -> None:
    torch.manual_seed(0)
    model = task.model().eval()
    with torch.no_grad():
        whole = task.score(model, 0, 1)
        shares = [task.score(model, rank, 3) for rank in range(3)]
    assert sum(share[0] for share in shares) == pytest.approx(whole[0], rel=1e-4)
    assert sum(share[1] for share in shares) == whole[1]


def test_the_text_sample_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_SAMPLE_BYTES", 5)
    task = TextTask.of(SOURCE)
    torch.manual_seed(0)
    model = task.model().eval()
    with torch.no_grad():
        sample = task.sample(model)
        assert sample.startswith("def ")
        assert task.sample(model) == sample
