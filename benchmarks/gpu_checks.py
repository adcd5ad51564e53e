"""Checks of the backend on CUDA tensors, with several ranks on one GPU; `gpu.py` runs them."""

from __future__ import annotations

import datetime
import os
import signal
import time
from typing import Any

import torch
from torch import distributed as dist

from unisono.torch_backend import communicator_of

MIB = 1 << 20
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
LENGTHS = (0, 1, 7, 1000, 40_001)


def values(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns small numbers that depend on the rank, exact in every type."""
    return ((torch.arange(length) * (rank + 2) + rank) % 3 + 1).to(dtype)


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Returns True if a tensor on the GPU has these values, bit for bit."""
    found = found.cpu()
    expected = expected.to(found.dtype)
    return bool(torch.equal(found.view(torch.uint8), expected.view(torch.uint8)))


def check_operations(rank: int, ranks: int, is_short: bool = False) -> list[str]:
    """Compares every operation with one process; returns the failures. `is_short`: fewer element
    types and lengths."""
    failures: list[str] = []

    def expect(what: str, is_right: bool) -> None:
        if not is_right:
            failures.append(what)

    dtypes = (*FLOATS, *INTEGERS, *NARROW, torch.complex64, torch.bool)
    for dtype in (torch.float32, torch.bfloat16, torch.int64) if is_short else dtypes:
        for length in (1, 1000) if is_short else LENGTHS:
            every = [values(r, length, dtype) for r in range(ranks)]
            _check_movement(rank, ranks, every, expect)
            if dtype not in (torch.bool, *NARROW):
                _check_reductions(rank, ranks, every, expect)
    _check_lists(rank, ranks, expect)
    _check_messages(rank, ranks, expect)
    _check_streams(rank, ranks, expect)
    _check_allocations(ranks, expect)
    return failures


def _check_movement(rank: int, ranks: int, every: list[torch.Tensor], expect: Any) -> None:
    mine, what = every[rank].cuda(), f"{every[0].dtype} x {len(every[0])}"
    out = torch.empty(ranks * len(mine), dtype=mine.dtype, device="cuda")
    dist.all_gather_into_tensor(out, mine)
    expect(f"all_gather {what}", equal(out, torch.cat(every)))
    x = mine.clone()
    dist.broadcast(x, ranks - 1)
    expect(f"broadcast {what}", equal(x, every[-1]))
    x = torch.cat([every[(rank + r) % ranks] for r in range(ranks)]).cuda()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    pieces = [every[(r + rank) % ranks] for r in range(ranks)]
    expect(f"all_to_all {what}", equal(out, torch.cat(pieces)))


def _check_reductions(rank: int, ranks: int, every: list[torch.Tensor], expect: Any) -> None:
    mine, what = every[rank].cuda(), f"{every[0].dtype} x {len(every[0])}"
    wide = torch.complex128 if mine.dtype.is_complex else torch.float64
    total = torch.stack(every).to(wide).sum(0)
    for later in (False, True):
        x = mine.clone()
        work = dist.all_reduce(x, async_op=later)
        if later:
            work.wait()
        expect(f"all_reduce {what} {later}", equal(x, total))
    x = mine.repeat(ranks)
    out = torch.empty_like(mine)
    dist.reduce_scatter_tensor(out, x)
    expect(f"reduce_scatter {what}", equal(out, total))
    x = mine.clone()
    dist.reduce(x, 0)
    expect(f"reduce {what}", rank != 0 or equal(x, total))
    if not mine.dtype.is_complex:
        x = mine.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX)
        expect(f"max {what}", equal(x, torch.stack(every).to(wide).max(0).values))


def _check_lists(rank: int, ranks: int, expect: Any) -> None:
    every = [values(r, 50 + r, torch.float32) for r in range(ranks)]
    outs = [torch.empty(50 + r, device="cuda") for r in range(ranks)]
    dist.all_gather(outs, every[rank].cuda())
    expect("uneven all_gather", all(map(equal, outs, every)))
    out = torch.empty(50 + rank, device="cuda")
    dist.scatter(out, [each.cuda() for each in every] if rank == 0 else None, src=0)
    expect("uneven scatter", equal(out, every[rank]))
    lists = [torch.empty(20, device="cuda") for _ in range(ranks)] if rank == 0 else None
    dist.gather(values(rank, 20, torch.float32).cuda(), lists, dst=0)
    expect(
        "gather",
        rank != 0 or all(equal(x, values(r, 20, torch.float32)) for r, x in enumerate(lists or [])),
    )
    objects: list[Any] = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank})
    expect("objects", objects == [{"rank": r} for r in range(ranks)])
    x = torch.full((8,), float(rank), device="cuda")
    y = x.clone()
    with dist._coalescing_manager(device=torch.device("cuda:0")):
        dist.all_reduce(x)
        dist.all_reduce(y)
    torch.cuda.synchronize()
    total = torch.full((8,), float(sum(range(ranks))))
    expect("coalescing", equal(x, total) and equal(y, total))
    x = torch.full((4, 6), float(rank), device="cuda")[:, ::2]
    dist.all_reduce(x)
    expect("strided", equal(x.contiguous(), torch.full((4, 3), float(sum(range(ranks))))))
    group = dist.new_group(list(range(ranks - 1)))
    if rank < ranks - 1:
        x = torch.ones(5, device="cuda")
        dist.all_reduce(x, group=group)
        expect("subgroup", equal(x, torch.full((5,), ranks - 1.0)))
    x = torch.full((3,), float(rank))
    dist.all_reduce(x)
    expect("cpu tensors", x[0] == sum(range(ranks)))
    x = torch.full((4,), 2.0, device="cuda")
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    expect("premul_sum", equal(x, torch.full((4,), float(ranks))))
    dist.barrier()


def _check_messages(rank: int, ranks: int, expect: Any) -> None:
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    for length in LENGTHS:
        x, y = values(rank, length, torch.bfloat16).cuda(), None
        y = torch.empty_like(x)
        operations = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        expect(f"messages {length}", equal(y, values(left, length, torch.bfloat16)))
    if rank == 0:
        dist.send(torch.arange(9.0, device="cuda"), 1)
    if rank == 1:
        y = torch.empty(9, device="cuda")
        expect("any source", dist.recv(y) == 0 and equal(y, torch.arange(9.0)))


def _check_streams(rank: int, ranks: int, expect: Any) -> None:
    """Data that slow kernels make, on other streams than the default, before and after calls."""
    size = 4096
    a = torch.rand(size, size, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    for number in range(10):
        with torch.cuda.stream(stream):
            for _ in range(3):
                a @ a  # delays what follows
            x = torch.full((1 << 20,), float(rank + number), device="cuda")
            works = []
            for _ in range(3):
                works.append(dist.all_reduce(x, async_op=True))
            for work in works:
                work.wait()
            bounds = torch.stack([x.min(), x.max()])
            x.zero_()  # may not overtake the peers' reads
        expected = (sum(range(ranks)) + ranks * number) * ranks**2
        stream.synchronize()
        expect(f"streams {number}", bounds.tolist() == [expected, expected])
        del x


def _check_allocations(ranks: int, expect: Any) -> None:
    """Memory that is freed and allocated again, at the same or other addresses."""
    for turn in range(12):
        x = torch.full(((1 + turn % 3) << 20,), float(turn), device="cuda")
        y = torch.full((1 << 18,), 1.0, device="cuda")[turn:]
        dist.all_reduce(x)
        dist.all_reduce(y)
        expect(f"allocation {turn}", bool((x == ranks * turn).all() and (y == ranks).all()))
        del x, y
        if turn % 2:
            torch.cuda.empty_cache()


def communicator() -> Any:
    """Returns unisono's communicator for CUDA tensors."""
    return communicator_of(dist.group.WORLD, "cuda")


def expandable(rank: int, ranks: int) -> list[str]:
    """Runs with memory that CUDA cannot share; returns in which way the data moved."""
    x = torch.full((MIB,), rank + 1.0, device="cuda")
    dist.all_reduce(x)
    return [str(bool((x == sum(range(1, ranks + 1))).all())), communicator().explain()]


def train(rank: int, ranks: int, kind: str) -> list[float]:
    """Trains a small transformer; returns its losses."""
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q(self.norm(x))
            x = x + self.o(F.scaled_dot_product_attention(q, q, q, is_causal=True))
            return x + self.down(F.gelu(self.up(self.norm(x))))

    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Embedding(64, 32), *(Block(32) for _ in range(3)), nn.Linear(32, 64)
    ).to("cuda", torch.float64)
    sharded = 1
    if kind == "ddp":
        model, sharded = nn.parallel.DistributedDataParallel(model), ranks
    if kind == "fsdp+tp":
        mesh = init_device_mesh("cuda", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        sharded, rank = ranks // 2, mesh.get_local_rank("dp")
        plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in list(model)[1:-1]:
            parallelize_module(block, mesh["tp"], plan)
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    data = torch.randint(64, (20, 8, 17), generator=torch.Generator().manual_seed(1)).cuda()
    losses = []
    for batch in data:
        part = batch.chunk(sharded)[rank if sharded > 1 else 0]
        loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if sharded > 1:
            dist.all_reduce(total)
            total /= ranks
        losses.append(float(total))
    return losses


def fault(rank: int, ranks: int, kind: str) -> Any:
    """Provokes a fault; returns the error, and the seconds that its report took."""
    x = torch.ones(MIB, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    start_s = time.monotonic()
    try:
        if kind == "killed" and rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "killed in work" and rank == 1:
            a = torch.rand(8192, 8192, device="cuda")
            for _ in range(200):
                a @ a
            dist.all_reduce(x, async_op=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "killed in a message":
            dist.send(x, 0) if rank else dist.recv(x, 1)
            torch.cuda.synchronize()
            if rank == 1:  # the header is sent, and the device does not get to the flag
                a = torch.rand(8192, 8192, device="cuda")
                for _ in range(200):
                    a @ a
                dist.isend(x, 0)
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGKILL)
            dist.recv(x, 1)
        if kind == "late" and rank == 1:
            time.sleep(6)
            return ["", 0.0]
        if kind == "late":
            dist.group.WORLD.set_timeout(datetime.timedelta(seconds=2))
        length = 3 if kind == "mismatch" and rank == 1 else 4
        for _ in range(50):
            dist.all_reduce(torch.ones(length, device="cuda"))
        torch.cuda.synchronize()
    except Exception as error:
        took_s = time.monotonic() - start_s
        begin_s = time.monotonic()
        torch.cuda.synchronize()
        return [f"{type(error).__name__}: {error}"[:300], took_s, time.monotonic() - begin_s]
    return ["no error", time.monotonic() - start_s]


def mixed(rank: int, ranks: int) -> list[str]:
    """Runs CPU tensors over unisono and CUDA tensors over NCCL, and the controller over NCCL."""
    import unisono
    from unisono.controller import ProcessGroupTransfer

    x, y = torch.arange(4.0, device="cuda"), torch.arange(4.0)
    dist.all_reduce(x)
    dist.all_reduce(y)
    dist.broadcast(x, 0, async_op=True).wait()
    dist.barrier()
    dist.broadcast_object_list([1])
    with dist._coalescing_manager(device=torch.device("cuda:0")):
        dist.all_reduce(x)
        dist.all_reduce(x)
    dist.all_reduce(x, group=dist.new_group([0]))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).cuda())
    model(x[None]).sum().backward()
    with (
        unisono.init(rank=0, size=1, rendezvous="gpu") as comm,
        unisono.Controller(comm, transfer=ProcessGroupTransfer()) as controller,
    ):
        controller.all_reduce("z", x).wait()
    return [str(x.tolist()), str(y.tolist())]


def compiled(rank: int, ranks: int) -> list[str]:
    """Runs collectives in functions that torch has compiled; returns the failures."""
    failures = []

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    expected = torch.full((1000,), 2.0 * sum(range(1, ranks + 1)) + 1)
    for backend in ("eager", "aot_eager", "inductor"):
        torch._dynamo.reset()
        try:
            call = torch.compile(step, backend=backend, fullgraph=True)
            for _ in range(3):
                if not equal(call(torch.full((1000,), rank + 1.0, device="cuda")), expected):
                    failures.append(f"{backend}: other values")
        except Exception as error:
            failures.append(f"{backend}: {type(error).__name__}: {error}"[:400])
    return failures
