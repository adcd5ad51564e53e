"""Programs that end while a daemon thread is inside a call."""

from __future__ import annotations

CALLS = (
    "barrier()",
    "recv(np.ones(3), 1)",
    "all_gather_v(np.ones(3), async_op=True)",
    "recv(np.ones(3), 1, tag=1, async_op=True).wait(0.001)",
)
"""Calls that wait for a rank that does nothing. The last one ends, and begins again, at a high
rate: also after the interpreter has begun to end.
"""

_PROGRAM = """
import sys, threading, time
import numpy as np
import unisono

def join(rank):
    comms[rank] = unisono.init(rank=rank, size=2, rendezvous="NAME")

comms = [None, None]
threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
one, other = comms

def call():
    try:
        while True:
            try:
                one.CALL
            except TimeoutError:
                pass
    except unisono.CommunicationError:  # closed, or the other rank has left before
        pass

class EndsSlowly:
    def __del__(self):
        sleep(0.1)  # without the GIL: the thread goes on, and the interpreter ends it

sleep, sys.ends_slowly = time.sleep, EndsSlowly()
threading.Thread(target=call, daemon=True).start()
time.sleep(0.05)
"""


def program(call: str, rendezvous: str) -> str:
    """Returns a program in which a daemon thread repeats a call of `CALLS` until the end."""
    return _PROGRAM.replace("NAME", rendezvous).replace("CALL", call)
