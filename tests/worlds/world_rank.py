"""A rank of a world that runs the checks of a test module. conftest.py forks this process."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from unisono.torch_backend import stand_in_for
from worlds.forked import load
from worlds.torch_version import SKIPPED, refusal

STAND_IN = "stand-in for gloo"
"""The checks ask torch for gloo, and unisono stands in for it."""

_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The argument of a check."""

    rank: int
    size: int
    backend: str
    folder: Path


def main(module_file: str, backend: str, rank: int, ranks: int, folder: Path) -> None:
    module = load(module_file)
    if backend == STAND_IN:
        stand_in_for("gloo")
        backend = "gloo"
    prefixes = ("check_", "own_") if "unisono" in backend else ("check_",)
    checks = [name for name in vars(module) if name.startswith(prefixes)]
    world = World(rank=rank, size=ranks, backend=backend, folder=folder)
    store = _store(world)
    attempt = 0
    _join(world, store, attempt)
    with (folder / f"{rank}.jsonl").open("w") as results:
        for check in checks:
            error = _run(getattr(module, check), world)
            results.write(json.dumps({"check": check, "error": error}) + "\n")
            results.flush()
            if _any_failed(store, check, world, error):
                # The ranks may be at different calls, so the next check uses a new group.
                attempt += 1
                _leave()
                _join(world, store, attempt)
    _leave()
    # Rank 0 leaves last, since it runs the server of the store.
    store.set(f"gone/{rank}", "")
    if rank == 0:
        store.wait([f"gone/{r}" for r in range(ranks)], _TIMEOUT)


def _store(world: World) -> dist.Store:
    port_file = world.folder / "port"
    if world.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port_file.with_suffix(".new").write_text(str(store.port))
        port_file.with_suffix(".new").rename(port_file)
        return store
    while not port_file.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port_file.read_text()))


def _join(world: World, store: dist.Store, attempt: int) -> None:
    dist.init_process_group(
        world.backend,
        store=dist.PrefixStore(f"attempt{attempt}", store),
        rank=world.rank,
        world_size=world.size,
        timeout=_TIMEOUT,
    )


def _leave() -> None:
    try:
        dist.destroy_process_group()
    except Exception:
        traceback.print_exc()


def _run(check, world: World) -> str:
    torch.manual_seed(world.rank)
    try:
        check(world)
    except pytest.skip.Exception as reason:
        return f"{SKIPPED}{reason}"
    except (Exception, pytest.fail.Exception) as error:
        if reason := refusal(error):
            return f"{SKIPPED}{reason}"
        return traceback.format_exc()
    return ""


def _any_failed(store: dist.Store, check: str, world: World, error: str) -> bool:
    store.set(
        f"{check}/{world.rank}", "failed" if error and not error.startswith(SKIPPED) else "passed"
    )
    keys = [f"{check}/{rank}" for rank in range(world.size)]
    store.wait(keys, 3 * _TIMEOUT)
    return any(store.get(key) == b"failed" for key in keys)
