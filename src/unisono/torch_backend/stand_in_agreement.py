"""Agreement of a group's ranks that unisono stands in for Gloo on all of them.

A rank whose torch makes a Gloo group waits for the addresses of its peers, and a rank of unisono
for the entries of its peers, each until the timeout, which is 30 minutes. So each rank of unisono
looks for the key that Gloo writes into the store.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from unisono.errors import RendezvousError
from unisono.torch_backend.private import prefixed

_NAME = "unisono/stand_in"
_LONGEST_PAUSE_S = 0.1
_VERDICT_S = 5.0


def agree(store: Any, rank: int, size: int, mine: str, limit_s: float, *, watch: bool) -> list[str]:
    """Gives this rank's string `mine` to all ranks, and returns the strings of all ranks. None may
    contain a line break.

    Raises `RendezvousError` on all ranks that call this if a rank makes a Gloo group instead, or
    does not call. Without `watch`, the store may have keys of earlier Gloo groups.
    """
    store.set(f"{_NAME}/{rank}", mine)
    if rank == 0:
        ranks = range(size)
        problem = _wait(store, {each: f"{_NAME}/{each}" for each in ranks}, limit_s, watch)
        texts = [] if problem else [store.get(f"{_NAME}/{each}").decode() for each in ranks]
        store.set(f"{_NAME}/all", "\n".join([problem, *texts]))
        if problem:  # the store may live in this process, which must not end before all know
            came = [each for each in ranks[1:] if store.check([f"{_NAME}/{each}"])]
            _wait(store, {each: f"{_NAME}/read/{each}" for each in came}, _VERDICT_S, False)
    else:
        problem = _wait(store, {0: f"{_NAME}/all"}, limit_s + _VERDICT_S, watch)
        if not problem:
            problem, *texts = store.get(f"{_NAME}/all").decode().split("\n")
            if problem:
                store.set(f"{_NAME}/read/{rank}", "")
    if problem:
        raise RendezvousError(f"rank {rank} of {size}: {problem}")
    return texts


def _wait(store: Any, keys: dict[int, str], limit_s: float, watch: bool) -> str:
    """Waits until the key of each rank exists. Returns the problem, or an empty text."""
    deadline = time.monotonic() + limit_s
    pause_s = 1e-3
    # This asks, because torch's store logs a warning for each wait that ends without the keys.
    while not store.check(list(keys.values())):
        late = time.monotonic() > deadline
        if late or (watch and pause_s == _LONGEST_PAUSE_S):
            missing = [rank for rank, key in keys.items() if not store.check([key])]
            if watch and (others := [rank for rank in missing if _makes_gloo(store, rank)]):
                return _mixed(others)
            if late and missing:
                return f"after {limit_s:g} s (timeout) these ranks have not called: {missing}"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return ""


def _makes_gloo(store: Any, rank: int) -> bool:
    """Returns True if a rank has written its address for Gloo."""
    return bool(prefixed(store, "cpu/").check([f"0/{rank}"]))


def _mixed(others: Sequence[int]) -> str:
    return (
        f"ranks {list(others)} make this group with torch's own Gloo, other ranks with unisono in "
        "its place: set UNISONO_REPLACE=gloo on all ranks, or on none"
    )
