"""Writes a ring all-reduce by hand with send and recv, and compares it with the library's.

Covers: `send(async_op=True)`, `recv`, `all_reduce`. Scenario: 4 ranks with 4 MiB each. If every
rank first sent and then received, all large messages would wait for their receivers. So each rank
sends in the background while it receives.

    python examples/ring_by_hand.py
"""

import time

import numpy as np

import unisono

ELEMENTS = 1 << 20


def ring_all_reduce(comm, x):
    """Adds `x` over all ranks, in place. Each rank sends only to the next one."""
    parts = np.array_split(x, comm.size)  # views of x
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    incoming = np.empty_like(parts[0])
    for step in range(2 * (comm.size - 1)):
        collects = step < comm.size - 1  # first the sums, then their copies
        outgoing = parts[(comm.rank - step) % comm.size]
        sent = comm.send(outgoing, dst=after, async_op=True)
        arrived = parts[(comm.rank - step - 1) % comm.size]
        comm.recv(incoming[: len(arrived)], src=before)
        arrived[:] = arrived + incoming[: len(arrived)] if collects else incoming[: len(arrived)]
        sent.wait()
    return x


def program():
    with unisono.init() as comm:
        x = np.random.default_rng(comm.rank).random(ELEMENTS).astype(np.float32)
        seconds = {}
        for name, call in {"by hand": ring_all_reduce, "library": type(comm).all_reduce}.items():
            times = []
            for _ in range(9):
                y = x.copy()
                comm.barrier()
                begin = time.perf_counter()
                call(comm, y)
                times.append(time.perf_counter() - begin)
            seconds[name] = sorted(times)[len(times) // 2]
            expected = sum(np.random.default_rng(r).random(ELEMENTS) for r in range(comm.size))
            assert np.allclose(y, expected, rtol=1e-5), name
        return seconds


if __name__ == "__main__":
    print({name: f"{1e3 * each:.1f} ms" for name, each in unisono.run(program, ranks=4)[0].items()})
