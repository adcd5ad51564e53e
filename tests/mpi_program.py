"""The program of the ranks that mpiexec starts for tests/bootstrap/test_mpi_network.py.

Arguments: a scenario, and the simulated host of each rank, for example 0,0,1,1.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import selectors
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import unisono
from time_limits import limit_s
from unisono import Communicator, config
from unisono.transport.mpi_transport import WATCH_TAG, MpiLink

Body = Callable[[Communicator], None]


def main() -> None:
    scenario, hosts = sys.argv[1:]
    os.environ["UNISONO_WIRE"] = "mpi"
    world = config.launched_rank()
    os.environ["UNISONO_HOST_ID"] = hosts.split(",")[world.rank]
    comm = unisono.init(timeout_s=20)
    assert comm.hosts == layout(hosts), comm.hosts
    SCENARIOS[scenario](comm)
    comm.close()
    # a single write, so that lines of several ranks do not mix
    os.write(1, f"rank {comm.rank} is done\n".encode())


def layout(hosts: str) -> tuple[tuple[int, ...], ...]:
    names = hosts.split(",")
    return tuple(
        tuple(rank for rank, name in enumerate(names) if name == host)
        for host in dict.fromkeys(names)
    )


def everything(comm: Communicator) -> None:
    for dtype in ("float32", "float64", "float16", "int32", "uint8", "complex64"):
        for length in (0, 1, 7, 1000):
            collectives(comm, np.dtype(dtype), length)
    collectives(comm, np.dtype("int64"), 300_001)
    messages(comm)
    windows(comm)
    parts(comm)
    if len(comm.hosts) > 1:
        many(comm)


def collectives(comm: Communicator, dtype: np.dtype, length: int) -> None:
    n, rank = comm.size, comm.rank
    rng = np.random.default_rng(length)
    rows = rng.integers(0, 7, (n, n, length)).astype(dtype)
    own = rows[rank]

    def check(what: str, got: np.ndarray, wanted: np.ndarray) -> None:
        assert np.array_equal(got, wanted), (what, dtype, length, rank)

    total = rows.sum(axis=0, dtype=dtype)
    check("all_reduce", comm.all_reduce(own.copy()), total)
    begun = comm.all_reduce(own.copy(), async_op=True)
    if dtype.kind != "c":
        check("max", comm.all_reduce(own.copy(), "max"), rows.max(axis=0))
    check("begun", begun.wait(), total)
    for root in (0, n - 1):
        check("broadcast", comm.broadcast(own.copy(), root=root), rows[root])
        reduced = comm.reduce(own.copy(), root=root)
        gathered = comm.gather(own.ravel(), root=root)
        if rank == root:
            check("reduce", reduced, total)
            check("gather", gathered, rows.ravel())
        out = np.empty(length, dtype)
        comm.scatter(own.ravel() if rank == root else None, out=out, root=root)
        check("scatter", out, rows[root, rank])
    check("all_gather", comm.all_gather(own.ravel()), rows.ravel())
    check("reduce_scatter", comm.reduce_scatter(own.ravel()), total[rank])
    check("all_to_all", comm.all_to_all(own.ravel()), rows[:, rank].ravel())
    check("scan", comm.scan(own.copy()), rows[: rank + 1].sum(axis=0, dtype=dtype))
    comm.barrier()


def windows(comm: Communicator) -> None:
    n, me = comm.size, comm.rank
    for length in (1, 1000, 300_000):
        array = comm.empty((n, length), np.int64)
        with comm.window(array) as window:
            for number in range(3):
                for peer in range(n):
                    window.put(np.full(length, number + me), peer, me * length, signal=True)
                for peer in range(n):
                    window.wait(peer)
                    found = window.get(np.empty(length, np.int64), peer, me * length)
                    assert (array[peer] == number + peer).all() and (found == number + me).all()
                comm.barrier()


def messages(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    for length in (0, 1, 1000, 1_000_000):
        x = np.full(length, rank, np.int64)
        out = np.empty_like(x)
        with comm.batch():
            comm.send(x, right)
            comm.recv(out, left)
        assert (out == left).all()
    # Sends more messages than a peer accepts before it receives, then receives them in another
    # order.
    many = [np.full(100, 1000 * rank + i) for i in range(200)]
    sent = [comm.send(x, right, tag=i, async_op=True) for i, x in enumerate(many)]
    for i in reversed(range(200)):
        out = np.empty(100, np.int64)
        comm.recv(out, left, tag=i)
        assert (out == 1000 * left + i).all()
    for work in sent:
        work.wait()


def parts(comm: Communicator) -> None:
    for color in (comm.rank % 2, comm.rank // 2):
        colors = comm.all_gather(np.array([color]))
        part = comm.split(color, key=-comm.rank)
        assert part is not None
        with part:
            x = np.full(10_000, comm.rank)
            part.all_reduce(x)
            assert (x == np.flatnonzero(colors == color).sum()).all()
            part.barrier()


def mismatch(comm: Communicator) -> None:
    comm.barrier()
    x = np.ones(100 + comm.rank // 2)
    expect(unisono.MismatchError, lambda: comm.all_reduce(x), "all_reduce")


def abort(comm: Communicator) -> None:
    comm.barrier()
    expect(
        unisono.UnsupportedError,
        comm.shrink,
        "a communicator that uses MPI between hosts cannot shrink",
    )
    comm.barrier()  # the communicator still works
    if comm.rank == 0:
        comm.abort("enough")
    expect(unisono.AbortedError, lambda: comm.all_reduce(np.ones(10)), "enough")


def torn(comm: Communicator) -> None:
    """Aborts groups with many pending calls. Afterwards their memory can be freed."""
    for delay_s in (0.01, 0.02, 0.03, 0.05):
        part = comm.split(0)
        assert part is not None
        comm.barrier()  # all ranks have reached this line
        try:
            tear(part, delay_s)
        except unisono.AbortedError as error:
            assert "enough" in str(error), error
        part.close()
        del part
        gc.collect()
        comm.barrier()  # MPI still works


def tear(comm: Communicator, delay_s: float) -> None:
    length = 16 << 20
    works = [comm.all_reduce(np.ones(length // 4, np.float32), async_op=True)]
    array = comm.empty(length, np.uint8)
    window = comm.window(array)
    puts = threading.Thread(target=put_until_failed, args=(window, comm.size - 1))
    puts.start()
    for peer in set(range(comm.size)) - {comm.rank}:
        works.append(comm.recv(np.zeros(length, np.uint8), peer, async_op=True))
        works.append(comm.send(np.zeros(length, np.uint8), peer, async_op=True))
    if comm.rank == 0:
        time.sleep(delay_s)
        comm.abort("enough")
    try:
        for work in works:
            work.wait()
    finally:
        puts.join()


def put_until_failed(window: unisono.Window, peer: int) -> None:
    x = np.zeros(len(window.array), np.uint8)
    with contextlib.suppress(unisono.AbortedError):
        while True:
            window.put(x, peer)
            window.get(x, peer)


def many(comm: Communicator) -> None:
    """Makes many groups in sequence with few MPI communicators, whose number is limited."""
    handles = set()
    for number in range(10):
        sets = ((0, 1, 2, 3),) if number % 2 else ((3, 1, 0), (2,))
        for part in filter(None, map(comm.group, sets)):
            with part:
                if len(part.hosts) > 1:
                    handles.add(_link(part).comm.py2f())
                part.all_reduce(np.ones(100 if number % 3 else 100_000))
    assert len(handles) < 5, sorted(handles)


def forked(comm: Communicator) -> None:
    """Checks that a forked child process does not use its parent's groups."""
    comm.barrier()
    child = os.fork()
    if child == 0:
        comm.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    network: Any = comm._network and comm._network.network
    (entered,) = network._groups.values()
    with selectors.DefaultSelector() as selector:
        selector.register(entered.watch._doorbell.fd, selectors.EVENT_READ)
        assert not selector.select(0), (
            "the child's copy of the descriptor wakes the parent's thread"
        )
    comm.barrier()


def garbage(comm: Communicator) -> None:
    """Sends messages that no rank of this version of the library sends. The receiving group must
    fail with a clear error, even if its file descriptors have high numbers.
    """
    forked(comm)
    kept = _high_descriptors()
    for said, heard in {
        b"": "rank 0 sent a malformed message: 0 bytes of kind 0",
        struct.pack("<BI", 3, 0) + b"short": "rank 0 sent a malformed message: 10 bytes of kind 3",
        struct.pack("<BI", 1, 99) + b"too warm": "too warm",
    }.items():
        part = comm.split(0)
        assert part is not None
        part.barrier()
        link = _link(part)
        if comm.rank == 0:
            for peer in comm.hosts[1]:
                link.comm.Send([said, link.mpi.BYTE], peer, WATCH_TAG)
        if comm.rank in comm.hosts[1]:
            expect(unisono.UnisonoError, lambda part=part: _until_failed(part), heard)
        part.close()
        comm.barrier()
    for fd in kept:
        os.close(fd)


def _high_descriptors() -> list[int]:
    """Opens so many descriptors that later descriptors have numbers too high for `select`."""
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    return [os.dup(0) for _ in range(1100)]


def _until_failed(comm: Communicator) -> None:
    while True:
        comm.recv(np.empty(1), comm.rank, tag=7)


def _link(comm: Communicator) -> MpiLink:
    assert comm._network is not None
    network: Any = comm._network.network
    found: MpiLink = network._groups[comm._network.name].link
    return found


def late(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == 0:
        time.sleep(2.5)
        expect(unisono.CollectiveTimeoutError, lambda: comm.all_reduce(np.ones(10)), "rank 0")
        return
    comm.timeout_s = 1
    expect(unisono.CollectiveTimeoutError, lambda: comm.all_reduce(np.ones(10)), "rank 0")


def leave(comm: Communicator) -> None:
    """Lets ranks leave after their part of the work. A rank that still needs a departed rank gets
    an error.
    """
    comm.all_reduce(np.ones(1000))
    last = comm.size - 1
    if comm.rank == 0:
        for length in (10, 100_000):
            comm.send(np.arange(length), last)
        return
    if comm.rank == last:
        time.sleep(0.3)
        for length in (10, 100_000):
            out = np.empty(length, np.int64)
            comm.recv(out, 0)
            assert (out == np.arange(length)).all()
        expect(unisono.PeerLostError, lambda: comm.recv(np.empty(10), 0), "rank 0")


def leave_while_sending(comm: Communicator) -> None:
    """Lets rank 0 leave while it sends a large message. The receiver gets an error before its
    timeout, and no content that rank 0 wrote afterwards.
    """
    x = np.full(1 << 22, comm.rank, np.uint8)
    if comm.rank == 0:
        work = comm.send(x, 2, async_op=True)
        comm.close()
        expect(unisono.AbortedError, work.wait, "closed")
        x[:] = 99
        time.sleep(1)
    elif comm.rank == 2:
        time.sleep(0.3)
        expect(unisono.PeerLostError, lambda: comm.recv(x, 0), "rank 0")


def killed(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(np.ones(1000))


def expect(kind: type[Exception], call: Callable[[], object], part: str) -> None:
    began = time.monotonic()
    try:
        call()
    except kind as error:
        assert part in str(error), error
        assert time.monotonic() - began < limit_s(1), "the error took too long"
    else:
        raise AssertionError(f"no {kind.__name__}")


SCENARIOS: dict[str, Body] = {
    body.__name__: body
    for body in (
        everything,
        garbage,
        mismatch,
        abort,
        torn,
        late,
        leave,
        leave_while_sending,
        killed,
    )
}

if __name__ == "__main__":
    main()
