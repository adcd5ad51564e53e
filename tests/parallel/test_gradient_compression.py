"""The codes of gradients, compared with NumPy and their error bounds; exchanges with error
feedback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

torch = pytest.importorskip("torch")

from ranks import Threads  # noqa: E402
from unisono import Communicator  # noqa: E402
from unisono.controller import Controller  # noqa: E402
from unisono.parallel import Bf16, Fp16, Int8, PowerSGD, TopK, data_parallel  # noqa: E402
from unisono.parallel.compression.narrow_float_exchange import part_of_average  # noqa: E402
from unisono.parallel.data_parallelism.compression_state import make_exchange  # noqa: E402
from unisono.parallel.data_parallelism.gradient_exchange import average_all  # noqa: E402

pytestmark = pytest.mark.torch

World = Callable[[int], Threads]
LARGEST_FP16 = 65504.0


def vectors(dtype: str, largest: float = 2.0**100) -> st.SearchStrategy[np.ndarray]:
    width = np.dtype(dtype).itemsize * 8
    values = st.floats(-largest, largest, width=width, allow_nan=False)
    return arrays.arrays(dtype, st.integers(1, 70), elements=values)


def _decoded(codec: Any, values: Any) -> Any:
    total = torch.zeros_like(values)
    message = codec.encode(values)
    assert message.numel() == codec.message_bytes(values.numel(), values.dtype.itemsize)
    codec.add_decoded(message, total)
    return total


# ---- 8-bit integers


@given(values=vectors("float32") | vectors("float64"), run=st.integers(1, 40))
def test_int8_is_within_half_a_scale(values: np.ndarray, run: int) -> None:
    decoded = _decoded(Int8(values_per_scale=run), torch.from_numpy(values)).numpy()
    for start in range(0, len(values), run):
        part = values[start : start + run].astype(np.float64)
        # The scale is the quotient (largest value / 127), rounded up to a float32.
        exact = np.abs(part).max() / 127
        scale = max(float(np.nextafter(np.float32(exact), np.float32(np.inf))), exact)
        error = np.abs(decoded[start : start + run] - part).max()
        assert error <= scale / 2 * (1 + 1e-6), (part, decoded[start : start + run])


def test_int8_keeps_small_runs_beside_large_ones() -> None:
    values = torch.cat([torch.full((256,), 1e6), torch.full((256,), 1e-6)])
    assert torch.allclose(_decoded(Int8(values_per_scale=256), values), values)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_int8_and_top_k_show_values_that_are_not_finite(bad: float) -> None:
    values = torch.tensor([1.0, bad, 2.0, 0.5])
    assert not torch.isfinite(_decoded(Int8(values_per_scale=2), values)[:2]).all()
    assert torch.isfinite(_decoded(Int8(values_per_scale=2), values)[2:]).all()
    assert not torch.isfinite(_decoded(TopK(fraction=0.1), values)).all()


# ---- top-k


@given(values=vectors("float32") | vectors("float64"), fraction=st.floats(0.001, 1))
def test_top_k_contracts(values: np.ndarray, fraction: float) -> None:
    codec = TopK(fraction=fraction)
    decoded = _decoded(codec, torch.from_numpy(values)).numpy().astype(np.float64)
    kept = codec.kept(len(values))
    assert (
        np.count_nonzero(decoded) <= kept == min(len(values), int(np.ceil(fraction * len(values))))
    )
    magnitudes = np.sort(np.abs(values))[::-1]
    assert np.array_equal(np.sort(np.abs(decoded))[::-1][:kept], magnitudes[:kept])
    exact = values.astype(np.float64)
    left, all_of_it = np.square(exact - decoded).sum(), np.square(exact).sum()
    assert left <= (1 - kept / len(values)) * all_of_it * (1 + 1e-9)


# ---- 16-bit floats


@pytest.mark.parametrize("ranks", range(1, 40))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_sum_of_the_largest_gradients_is_finite(ranks: int, dtype: str) -> None:
    kind = getattr(torch, dtype)
    largest = torch.finfo(kind).max
    grads = torch.tensor([largest, -largest, largest * 0.9999, 0.0], dtype=torch.float64)
    part = part_of_average(grads, ranks, kind)
    total = (part.double() * ranks).to(kind)  # as in the reduction: an exact sum, rounded once
    assert torch.isfinite(total).all()
    assert torch.allclose(total.double(), grads, rtol=2 * torch.finfo(kind).eps)


@given(
    grads=arrays.arrays(
        "float32",
        st.tuples(st.integers(1, 7), st.integers(1, 9)),
        elements=st.floats(-LARGEST_FP16, LARGEST_FP16, width=32),
    )
)
def test_fp16_is_within_its_rounding(grads: np.ndarray) -> None:
    ranks = len(grads)
    parts = [part_of_average(torch.from_numpy(row), ranks, torch.float16) for row in grads]
    total = np.sum([part.numpy().astype(np.float64) for part in parts], axis=0)
    average = total.astype(np.float16).astype(np.float64)
    exact = grads.astype(np.float64).mean(0)
    size = np.abs(grads.astype(np.float64)).mean(0)
    # Each rank's part of the average and the sum of the parts are rounded to float16, with a
    # relative error of 2^-11. A part just above the limit of `part_of_average` is rounded with
    # twice this error. Subnormals are rounded with an absolute error of 2^-25.
    assert (np.abs(average - exact) <= 3 * 2.0**-11 * size + (ranks + 1) * 2.0**-25).all()


def test_infinite_gradients_stay_infinite() -> None:
    grads = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e9])
    for ranks in (2, 3):
        assert not torch.isfinite(part_of_average(grads, ranks, torch.float16)).any()


@pytest.mark.parametrize("ranks", [2, 3])
def test_large_gradients_over_ranks_give_no_infinity(ranks: int, threads: World) -> None:
    def check(comm: Communicator) -> None:
        grads = torch.tensor([LARGEST_FP16, -LARGEST_FP16, 100_000.0 if comm.rank == 0 else 0.0])
        with Controller(comm) as controller:
            found = average_all(make_exchange(Fp16(), controller), {"w": grads.clone()})["w"]
        exact = torch.tensor([LARGEST_FP16, -LARGEST_FP16, 100_000.0 / ranks])
        assert torch.allclose(found, exact, rtol=1e-3)

    threads(ranks).run(check)


# ---- error feedback


def _gradients(steps: int, ranks: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(steps, ranks, *shape))


@pytest.mark.parametrize(
    ("compression", "shape"),
    [
        (TopK(fraction=0.1), (37,)),
        (TopK(fraction=0.1), (6, 7)),
        (Int8(values_per_scale=8), (37,)),
        (PowerSGD(rank=1), (9, 8)),
    ],
)
def test_what_is_left_out_returns(compression: Any, shape: Any, threads: World) -> None:
    """Tests that the sum of all averages, plus the average of the last errors, is the sum of the
    uncompressed averages.
    """
    steps, ranks = 12, 3
    grads = _gradients(steps, ranks, *shape)

    def check(comm: Communicator) -> Any:
        with Controller(comm) as controller:
            exchange = make_exchange(compression, controller)
            total = torch.zeros(shape, dtype=torch.float64)
            for step in range(steps):
                mine = torch.from_numpy(grads[step, comm.rank])
                total += average_all(exchange, {"w": mine.clone()})["w"]
            assert "w" in exchange.state()
            return total.numpy(), exchange.state()["w"]["error"].numpy()

    found = threads(ranks).run(check)
    errors = np.mean([error for _, error in found], axis=0)
    assert np.abs(errors).max() > 1e-3  # the compression did omit values
    for total, _ in found:
        assert np.allclose(total + errors, grads.mean(1).sum(0), rtol=0, atol=1e-10)


@settings(max_examples=12)
@given(data=st.data())
def test_power_sgd_is_exact_for_gradients_of_low_rank(data: st.DataObject, threads: World) -> None:
    n, m = data.draw(st.integers(8, 20)), data.draw(st.integers(8, 20))
    rank = data.draw(st.integers(1, 2))
    true_rank = data.draw(st.integers(0, rank))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    left = rng.normal(size=(2, n, true_rank))
    grads = np.einsum("rnk,km->rnm", left, rng.normal(size=(true_rank, m)))

    def check(comm: Communicator) -> None:
        with Controller(comm) as controller:
            settings_of = PowerSGD(rank=rank, min_compression=0.5, error_feedback=False)
            exchange = make_exchange(settings_of, controller)
            for _ in range(2):
                mine = torch.from_numpy(grads[comm.rank].copy())
                found = average_all(exchange, {"w": mine})["w"]
                assert np.allclose(found.numpy(), grads.mean(0), atol=1e-9)

    threads(2).run(check)


def _power_sgd_in_numpy(grads: np.ndarray, rank: int, q: np.ndarray) -> list[np.ndarray]:
    """Computes algorithms 1 and 2 of the PowerSGD paper in one process, with the mean over all
    ranks.
    """
    errors, averages = np.zeros(grads.shape[1:]), []
    for step in grads:
        matrices = step + errors
        q, _ = np.linalg.qr(q)
        p, _ = np.linalg.qr((matrices @ q).mean(0))
        q = (matrices.transpose(0, 2, 1) @ p).mean(0)
        averages.append(p @ q.T)
        errors = matrices - averages[-1]
    return averages


def test_power_sgd_equals_the_paper_and_a_fresh_start_gives_the_same_bits(threads: World) -> None:
    grads = _gradients(6, 3, 10, 4, 3)  # the shape of a convolution, as a matrix of 10 x 12

    def check(comm: Communicator) -> Any:
        runs = []
        for _ in range(2):
            with Controller(comm) as controller:
                exchange: Any = make_exchange(PowerSGD(rank=2), controller)
                matrix = torch.zeros(10, 12, dtype=torch.float64)
                q = exchange._first_q("w", matrix, 2).numpy()
                mine = [torch.from_numpy(each[comm.rank].copy()) for each in grads]
                runs.append([average_all(exchange, {"w": each})["w"].numpy() for each in mine])
        expected = _power_sgd_in_numpy(grads.reshape(6, 3, 10, 12), 2, q)
        for first, again, exact in zip(*runs, expected, strict=True):
            assert first.tobytes() == again.tobytes()
            assert np.allclose(first.reshape(10, 12), exact, atol=1e-9)
        return runs[0][-1].tobytes()

    assert len(set(threads(3).run(check))) == 1


def test_power_sgd_goes_on_after_gradients_of_zero(threads: World) -> None:
    def check(comm: Communicator) -> None:
        left, right = torch.arange(1.0, 9)[:, None], torch.arange(1.0, 11)[None]
        with Controller(comm) as controller:
            exchange = make_exchange(PowerSGD(rank=1), controller)
            for scale in (1.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0):
                found = average_all(exchange, {"w": left @ right * scale})["w"]
            assert torch.allclose(found, left @ right * 2, rtol=1e-4)

    threads(2).run(check)


def test_power_sgd_serves_gradients_whose_squares_are_zero(threads: World) -> None:
    def check(comm: Communicator) -> None:
        rng = np.random.default_rng(0)
        low_rank = rng.normal(size=(20, 2)) @ rng.normal(size=(2, 20))
        grad = torch.from_numpy(low_rank * 1e-30).float()
        with Controller(comm) as controller:
            exchange = make_exchange(PowerSGD(rank=2, error_feedback=False), controller)
            for _ in range(4):
                found = average_all(exchange, {"w": grad.clone()})["w"]
        assert torch.allclose(found, grad, rtol=1e-3, atol=1e-35)

    threads(2).run(check)


# ---- configurations


def test_wrong_configurations_are_refused(threads: World) -> None:
    for wrong in (
        lambda: TopK(fraction=0.0),
        lambda: TopK(fraction=1.5),
        lambda: Int8(values_per_scale=0),
        lambda: PowerSGD(rank=0),
        lambda: PowerSGD(min_compression=0.0),
        lambda: PowerSGD(dense_passes=-1),
    ):
        with pytest.raises(ValueError, match="expected"):
            wrong()

    def check(comm: Communicator) -> None:
        wrong: Any = Fp16
        with pytest.raises(TypeError, match="compression: expected None, Fp16"):
            data_parallel(torch.nn.Linear(2, 2), comm, compression=wrong)

    threads(1).run(check)


@pytest.mark.parametrize("compression", [Fp16(), Bf16(), PowerSGD(), Int8(), TopK()])
def test_tensors_that_are_not_compressed(compression: Any, threads: World) -> None:
    def check(comm: Communicator) -> None:
        tensors = {
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(float(comm.rank)),
            "complex": torch.full((4, 4), 1j * comm.rank),
        }
        with Controller(comm) as controller:
            found = average_all(make_exchange(compression, controller), tensors)
        assert found["empty"].shape == (0, 3)
        assert found["scalar"] == 0.5
        assert torch.equal(found["complex"], torch.full((4, 4), 0.5j))

    threads(2).run(check)
