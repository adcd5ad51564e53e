"""CPU tensors of torch, with any type and layout."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ranks import Threads
from unisono import Communicator, UnsupportedError, algorithms
from unisono.types import DType, ReduceOp

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

World = Callable[[int], Threads]
RANKS = 3


def values(dtype: Any, rank: int, shape: tuple[int, ...] = (6, 4)) -> Any:
    """Small integers that every type can represent."""
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randint(0, 2 if dtype == torch.bool else 5, shape, generator=generator)
    return whole.to(dtype) * (1 + 2j) if dtype.is_complex else whole.to(dtype)


def total(dtype: Any, shape: tuple[int, ...] = (6, 4)) -> Any:
    """The sum over the ranks, computed by torch in a wide type."""
    rows = torch.stack([values(dtype, rank, shape) for rank in range(RANKS)])
    if dtype == torch.bool:
        return rows.any(dim=0)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return rows.to(wide).sum(dim=0).to(dtype)


@pytest.mark.parametrize("name", [dtype.name.lower() for dtype in DType if not dtype.is_pair])
def test_every_tensor_type_works(name: str, threads: World) -> None:
    dtype = getattr(torch, name)

    def check(comm: Communicator) -> None:
        me = comm.rank
        x = values(dtype, me)
        assert comm.all_reduce(x) is x
        assert torch.equal(x, total(dtype))
        x = values(dtype, me)
        gathered = comm.all_gather(x)
        assert torch.equal(gathered, torch.cat([values(dtype, r) for r in range(RANKS)]))
        assert torch.equal(comm.reduce_scatter(x), total(dtype)[2 * me : 2 * me + 2])
        swapped = comm.all_to_all(x)
        expected = [values(dtype, r)[2 * me : 2 * me + 2] for r in range(RANKS)]
        assert torch.equal(swapped, torch.cat(expected))
        assert torch.equal(comm.broadcast(x, 1), values(dtype, 1))
        assert swapped.dtype == gathered.dtype == dtype
        if me:
            comm.send(values(dtype, me), 0)
        else:
            for source in (2, 1):
                comm.recv(x, source)
                assert torch.equal(x, values(dtype, source))

    threads(RANKS).run(check)


def test_tensors_of_any_layout_work(threads: World) -> None:
    def transposed(x: Any) -> Any:
        return x.t().contiguous().t()

    def strided(x: Any) -> Any:
        room = torch.full((x.shape[0], x.shape[1] * 2), 9, dtype=x.dtype)
        room[:, ::2] = x
        return room[:, ::2]

    def offset(x: Any) -> Any:
        room = torch.zeros(x.numel() + 1, dtype=x.dtype)
        return room[1:].view(x.shape).copy_(x)

    def parameter(x: Any) -> Any:
        return torch.nn.Parameter(x.clone())

    def conjugate(x: Any) -> Any:
        return x.conj().clone().conj()

    def check(comm: Communicator) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64):
            for layout in (transposed, strided, offset, parameter, conjugate):
                for asynchronous in (False, True):
                    x = layout(values(dtype, comm.rank))
                    work = comm.all_reduce(x, async_op=asynchronous)
                    assert (work.wait() if asynchronous else work) is x
                    assert torch.equal(x.detach(), total(dtype)), (dtype, layout.__name__)
                x = layout(values(dtype, comm.rank))
                found = comm.reduce_scatter(x)
                assert torch.equal(found, total(dtype)[2 * comm.rank : 2 * comm.rank + 2])
                out = layout(torch.zeros((6, 4), dtype=dtype))
                comm.all_to_all(x, out)
                assert torch.equal(comm.all_to_all(out).detach(), x.detach())

    threads(RANKS).run(check)


def test_lazily_conjugated_and_negated_tensors_work(threads: World) -> None:
    def check(comm: Communicator) -> None:
        z = torch.tensor([1 + 2j, 3 - 4j])
        x = z.clone().conj()
        assert x.is_conj()
        comm.all_reduce(x)
        assert torch.equal(x.resolve_conj(), z.conj().resolve_conj() * 2)
        negative = z.clone().conj().imag
        assert negative.is_neg()
        assert comm.all_gather(negative).tolist() == [-2, 4] * 2
        # contiguous tensors, which differ only in the conjugate or negative bit
        for lazy in (negative[:1], x):
            out = torch.zeros_like(lazy.resolve_conj().resolve_neg())
            assert torch.equal(comm.sendrecv(lazy, 1 - comm.rank, out, 1 - comm.rank), lazy)

    threads(2).run(check)


def test_tensors_of_one_element_work(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = torch.tensor(float(comm.rank))
        assert comm.all_reduce(x).item() == 3
        assert comm.all_gather(torch.tensor(comm.rank)).tolist() == [0, 1, 2]
        expanded = torch.tensor([comm.rank]).expand(2)
        assert comm.all_gather(expanded).tolist() == [0, 0, 1, 1, 2, 2]
        assert comm.reduce_scatter(torch.ones(1).expand(6)).tolist() == [3, 3]
        assert comm.all_reduce(torch.zeros(0, 5)).shape == (0, 5)

    threads(RANKS).run(check)


@pytest.mark.parametrize("algorithm", [None, *algorithms.names("all_reduce")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_narrow_floats_are_rounded_once(
    dtype: Any, algorithm: str | None, threads: World
) -> None:
    rows = torch.randn(5, 1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    wide = rows[0].float()
    for row in rows[1:]:
        wide = wide + row.float()

    def check(comm: Communicator) -> None:
        found = comm.all_reduce(rows[comm.rank].clone(), algorithm=algorithm)
        if algorithm in (None, "one_shot", "direct"):
            assert torch.equal(found, wide.to(dtype))
        # the order of additions differs, so a float32 sum may differ by less than one rounding
        else:
            eps = torch.finfo(dtype).eps
            assert (found.float() - wide).abs().le(wide.abs() * eps * 0.51 + 1e-6).all()
        big = torch.full((3,), 256.0 if comm.rank == 0 else 0.5)
        narrow = big.to(torch.bfloat16)
        assert comm.all_reduce(narrow, algorithm=algorithm).tolist() == [258] * 3

    threads(5).run(check)


def test_every_reduction_of_bfloat16(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = torch.tensor([1.0, -2.0, 4.0, 8.0], dtype=torch.bfloat16) * (comm.rank + 1)
        expected = {
            "sum": [6, -12, 24, 48], "prod": [6, -48, 384, 3072], "min": [1, -6, 4, 8],
            "max": [3, -2, 12, 24], "avg": [2, -4, 8, 16],
        }  # fmt: skip
        for op, result in expected.items():
            for algorithm in algorithms.names("all_reduce"):
                found = comm.all_reduce(x.clone(), op, algorithm=algorithm)
                assert found.tolist() == result, (op, algorithm)
        with pytest.raises(UnsupportedError, match="bfloat16 does not support bxor"):
            comm.all_reduce(x, ReduceOp.BXOR)

    threads(RANKS).run(check)


class AcceleratorTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor that claims to be on an accelerator; the library must not touch its memory."""

    is_cpu = False
    device = torch.device("cuda", 3)


def test_unsupported_tensors_are_refused(threads: World) -> None:
    def check(comm: Communicator) -> None:
        comm.all_reduce(torch.ones(2))  # prepares the fast path for such calls
        cases = [
            (torch.ones(2).as_subclass(AcceleratorTensor), "cuda:3"),
            (torch.zeros(2, device="meta"), "meta"),
            (torch.zeros(2, 2).to_sparse(), "sparse"),
            (torch.zeros(2, dtype=torch.float8_e4m3fnuz), "float8_e4m3fnuz"),
        ]
        for x, text in cases:
            for _ in range(2):
                with pytest.raises(UnsupportedError, match=text):
                    comm.all_reduce(x)
        assert comm.all_reduce(torch.ones(1)).item() == 2

    threads(2).run(check)


class Named(torch.Tensor):  # type: ignore[misc]
    """A subclass of `torch.Tensor` that stores its elements in ordinary memory."""


def test_subclasses_of_tensors_work(threads: World) -> None:
    kinds: list[Callable[[Any], Any]] = [
        torch.nn.Parameter,
        torch.nn.Buffer,
        lambda x: x.requires_grad_(),
        lambda x: x.requires_grad_() * 1,
        lambda x: x.as_subclass(Named),
    ]

    def check(comm: Communicator) -> None:
        for kind in kinds:
            for _ in range(2):
                x = kind(torch.full((7,), comm.rank + 1.0))
                address = x.data_ptr()
                assert comm.all_reduce(x) is x
                assert x.tolist() == [6] * 7
                assert x.data_ptr() == address

    threads(RANKS).run(check)


class TensorLike:
    """An object that has a tensor's attributes but is not a tensor."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)


def test_objects_similar_to_tensors_are_refused(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = torch.ones(2)
        for _ in range(2):
            with pytest.raises(TypeError, match="a CPU torch tensor, not TensorLike"):
                comm.all_reduce(TensorLike(x))
            comm.all_reduce(x)

    threads(2).run(check)


class Interrupted(torch.Tensor):  # type: ignore[misc]
    """A tensor that raises KeyboardInterrupt at the first access of its layout."""

    seen = False

    def is_contiguous(self) -> bool:
        if self.seen:
            return True
        self.seen = True
        raise KeyboardInterrupt


def test_an_interrupt_while_a_tensor_is_read_is_not_lost(threads: World) -> None:
    def check(comm: Communicator) -> None:
        for _ in range(2):
            x = torch.ones(2).as_subclass(Interrupted)
            with pytest.raises(KeyboardInterrupt):
                comm.all_reduce(x)
            assert comm.all_reduce(x).tolist() == [2, 2]

    threads(2).run(check)


def test_an_expanded_tensor_cannot_take_a_result(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = torch.ones(1).expand(4)
        calls: list[Callable[[], Any]] = [
            lambda: comm.all_reduce(x),
            lambda: comm.all_gather(torch.ones(2), x),
            lambda: comm.all_to_all(torch.ones(4), torch.ones(1, 2).expand(2, 2)),
            lambda: comm.all_reduce(torch.ones(6).as_strided((2, 3), (1, 1))),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=r"share memory.* give its \.contiguous\(\)"):
                call()
        array = np.lib.stride_tricks.as_strided(np.ones(4), (2, 3), (8, 8))
        with pytest.raises(ValueError, match=r"share memory.* give its \.copy\(\)"):
            comm.all_reduce(array)
        assert comm.all_reduce(x.contiguous()).tolist() == [2] * 4
        assert comm.all_reduce(torch.ones(2, 3, 4).permute(2, 0, 1)).sum().item() == 48

    threads(2).run(check)


def test_an_expanded_tensor_can_be_read(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = torch.tensor([[1.0], [2.0]]).expand(2, 2)
        assert comm.all_gather(x).tolist() == [[1, 1], [2, 2]] * 2
        assert comm.all_gather_v(x, out=torch.zeros(4, 2)).tolist() == [[1, 1], [2, 2]] * 2
        assert comm.all_to_all(x, torch.zeros(2, 2)).tolist() == [[1 + comm.rank] * 2] * 2
        out = torch.zeros(2, 2)
        assert comm.sendrecv(x, 1 - comm.rank, out, 1 - comm.rank).tolist() == x.tolist()
        if comm.rank == 0:  # the root only reads the tensor
            comm.broadcast(x, 0)
        else:
            assert comm.broadcast(torch.zeros(2, 2), 0).tolist() == x.tolist()

    threads(2).run(check)


def test_one_rank_may_use_tensors_and_another_arrays(threads: World) -> None:
    def check(comm: Communicator) -> None:
        x = torch.ones(5) if comm.rank else torch.ones(5).numpy()
        assert comm.all_reduce(x).tolist() == [2] * 5

    threads(2).run(check)


def test_a_tensor_with_other_memory_does_not_free_the_memory_of_its_call(threads: World) -> None:
    """Gives a tensor other memory by `set_` while its call is pending. The first all_reduce is
    checked by Python, the second takes the fast path.
    """
    begun = threading.Semaphore(0)
    begin: dict[str, Callable[[Communicator, Any], Any]] = {
        "all_reduce": lambda comm, x: comm.all_reduce(x, async_op=True),
        "all_reduce again": lambda comm, x: comm.all_reduce(x, async_op=True),
        "recv": lambda comm, x: comm.recv(x, 1, async_op=True),
    }

    def check(comm: Communicator) -> None:
        for what, call in begin.items():
            if comm.rank == 1:
                assert begun.acquire(timeout=60)
                x = np.ones(50_000)
                comm.send(x, 0) if what == "recv" else comm.all_reduce(x)
                continue
            array = np.ones(50_000)
            memory = weakref.ref(array)
            tensor = torch.from_numpy(array)
            work = call(comm, tensor)
            tensor.set_(torch.empty(0, dtype=torch.float64))
            del array
            gc.collect()
            is_kept = memory() is not None
            begun.release()
            work.wait()
            assert is_kept, what
            del work, tensor
            gc.collect()
            assert memory() is None, what

    threads(2).run(check)
