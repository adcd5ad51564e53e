"""Measures JAX's `psum` of 16 MiB between hosts of a lab, beside the rate of the link.

    python benchmarks/jax_hosts.py       # root; 2 hosts with 2 ranks each, 1 Gbit/s

With H hosts, 2 (H - 1) / H of the bytes cross each link. The rate of the link is that which iperf3
measures for the payload of one TCP connection. Every result is checked. The ranks of a host are
bound to their part of the cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated

import numpy as np
import typer
from jax_collectives import Ranks

from unisono.bench.lab import Lab
from unisono.bench.link_rate import link_rate
from unisono.bench.machine_facts import describe_machine
from unisono.launch.rank_threads import bind_threads

HOSTS, RANKS, PORT = 2, 2, 29_441
BYTES = 1 << 24


def measure(calls: int) -> list[float]:
    """Returns the seconds of each `psum`, on every rank."""
    bind_threads(int(os.environ["UNISONO_RANK"]) % RANKS, RANKS)
    import unisono.jax  # isort: skip # before jax

    import jax

    unisono.jax.initialize()
    ranks = Ranks()
    total = ranks.mapped(lambda x: jax.lax.psum(x, "ranks")[None][0])
    x = ranks.placed(np.full(BYTES // 4, ranks.rank + 1.0))
    ranks.own(total(x))
    times = []
    for _ in range(calls):
        begin_s = time.perf_counter()
        result = jax.block_until_ready(total(x))
        times.append(time.perf_counter() - begin_s)
        assert (ranks.own(result) == ranks.n * (ranks.n + 1) / 2).all()
    jax.distributed.shutdown()
    return times


def main(
    calls: Annotated[int, typer.Option(help="Calls.")] = 30,
    save: Annotated[Path | None, typer.Option(help="A file for the times, as JSON.")] = None,
) -> None:
    """Measures JAX between hosts."""
    if "UNISONO_RANK" in os.environ:
        print(json.dumps(measure(calls)), flush=True)
        return
    size = HOSTS * RANKS
    with Lab(hosts=HOSTS, rate="1gbit") as lab:
        common = {
            **os.environ,
            "UNISONO_SIZE": str(size),
            "UNISONO_RENDEZVOUS": f"tcp://{lab.address(0)}:{PORT}",
            "UNISONO_JOB_SECRET": f"jax-hosts-{os.getpid()}",
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        started = [
            lab.start(
                rank // RANKS,
                [sys.executable, __file__, "--calls", str(calls)],
                {**common, "UNISONO_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            outputs = [each.communicate(timeout=280)[0] for each in started]
        finally:
            for each in started:
                each.kill()
        rate = link_rate(lab)
    assert rate is not None
    times: list[float] = json.loads(outputs[0].splitlines()[-1])
    link_s = 2 * (HOSTS - 1) / HOSTS * BYTES / rate.rate_Bps
    low, _, high = quantiles(times, n=4)
    print(
        f"16 MiB: {1e3 * median(times):.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f}), link "
        f"{1e3 * link_s:.1f} ms: {median(times) / link_s:.3f}"
    )
    if save is not None:
        document = {"machine": describe_machine(), "link_s": link_s, "times_s": times}
        save.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    typer.run(main)
