"""A rank that receives no data for a long time is not lost while its host answers."""

from __future__ import annotations

import os
import time

import numpy as np

from bootstrap_stores import free_port
from ranks import Me, Processes

ASLEEP_S = 3.5
MORE_THAN_BUFFERS_HOLD = 8 << 20  # elements of float64


def far_apart(me: Me) -> None:
    """Runs two hosts that tolerate one second of silence while rank 1 computes for much longer."""
    os.environ |= {
        "UNISONO_HOST_ID": f"host{me.rank}",
        "UNISONO_INTERFACE": "=lo",
        "UNISONO_PEER_TIMEOUT_S": "1",
    }
    with me.join(40.0) as comm:
        x = np.full(MORE_THAN_BUFFERS_HOLD, float(comm.rank))
        if comm.rank == 0:
            comm.send(x[:10].copy(), 1)  # opens the connection between the hosts
            comm.send(x, 1)
        else:
            comm.recv(x[:10].copy(), 0)
            time.sleep(ASLEEP_S)  # meanwhile rank 0 waits, since the buffers are full
            comm.recv(x, 0)
        assert not x.any()
    me.say("done")


def test_a_rank_that_computes_for_long_is_not_lost() -> None:
    with Processes(far_apart, 2, name=f"tcp://127.0.0.1:{free_port()}") as job:
        job.wait_for("done", range(2))
        assert job.exit_codes() == [0, 0]
