"""Folders of checkpoints that are not the same on all ranks. Each rank has a folder of its own, as
the disks of hosts are, and reaches it by the same relative path.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from cases_in_turn import turn
from parallel.worlds.loaded_blocks import load_blocks
from unisono.parallel import Layout
from unisono.parallel.checkpoint import TensorBlock, block_checkpoint, save_blocks
from unisono.parallel.run import parallelize

pytestmark = pytest.mark.torch
RANKS = 3
BACKENDS = ("unisono",)
FOLDER = Path("checkpoints")


def test_checkpoint_folder(outcome):
    outcome.require_success()


def block(value: float, rank: int) -> TensorBlock:
    """Returns this rank's element of a vector."""
    values = torch.full((1,), value)
    return TensorBlock(name="w", shape=(RANKS,), start=(rank,), values=values)


@contextmanager
def disk_of(world, name: str, shared: bool = False) -> Iterator[Path]:
    """Works in a new folder of this rank, or of all ranks if `shared`."""
    disk = world.folder / (name if shared else f"{name}-{world.rank}")
    disk.mkdir(exist_ok=True)
    before = Path.cwd()
    os.chdir(disk)
    try:
        yield disk
    finally:
        os.chdir(before)
        dist.barrier()


def damaged_write(rank: int, *, on_disk: bool) -> Callable[..., None]:
    """Returns a function that writes blocks, of which those of one rank reach the disk changed."""
    write = block_checkpoint.write_blocks

    def written(blocks, group, *, checkpoint_id, **options):
        changed = [
            dataclasses.replace(
                each, values=each.values + (not on_disk and dist.get_rank() == rank)
            )
            for each in blocks
        ]
        write(changed, group, checkpoint_id=checkpoint_id, **options)
        if on_disk and dist.get_rank() == rank:
            (path,) = checkpoint_id.glob(f"__{rank}_*.distcp")
            content = bytearray(path.read_bytes())
            place = content.index(torch.full((1,), float(rank + 5)).numpy().tobytes())
            content[place] ^= 1
            path.write_bytes(content)
        dist.barrier()

    return written


def own_verified_saves_find_changed_values(world):
    for on_disk in (False, True):
        with turn(on_disk=on_disk), disk_of(world, f"verified{on_disk}", shared=True):
            save_blocks(FOLDER, [block(float(world.rank), world.rank)], verify=True)
            damaged = damaged_write(1, on_disk=on_disk)
            said = r"w \(rank 1\) differ from what was written"
            with (
                mock.patch.object(block_checkpoint, "write_blocks", damaged),
                pytest.raises(OSError, match=said),
            ):
                save_blocks(FOLDER, [block(world.rank + 5.0, world.rank)], verify=True)
            again = block(0.0, world.rank)
            load_blocks(FOLDER, [again])  # the checkpoint before is the newest complete one
            assert float(again.values) == world.rank


def disk_ofs_that_are_not_shared_are_refused_before_a_block_is_written(world):
    for leftovers in (False, True):  # of saves that were killed
        with turn(leftovers=leftovers), disk_of(world, f"apart{leftovers}") as disk:
            if leftovers:
                (FOLDER / "checkpoint-0").mkdir(parents=True)
                (FOLDER / "checkpoint-0" / "token").write_text("of another save")
            said = r"ranks 1, 2: .* is not the folder in which the group's first rank made"
            with pytest.raises(ValueError, match=said):
                save_blocks(FOLDER, [block(1, world.rank)])
            dist.barrier()
            assert not [*disk.rglob("*.distcp"), *disk.rglob("latest")]


def own_a_run_is_not_saved_to_disks_that_are_not_shared(world):
    run = parallelize(
        torch.nn.Linear(2, 2),
        Layout.parse(f"dp={RANKS},zero=1"),
        loss=torch.nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    )
    with disk_of(world, "run"), pytest.raises(ValueError, match="save to a disk that all ranks"):
        run.save(FOLDER)
    with disk_of(world, "together", shared=True):
        run.save(FOLDER)
        run.load(FOLDER)
    run.mesh.close()


def own_copies_must_be_complete_and_equal(world):
    with disk_of(world, "origin", shared=True) as origin:
        save_blocks(FOLDER, [block(10 + world.rank, world.rank)], extra={"steps": 4})

    def another(folder: Path) -> None:
        path = folder / "checkpoint-0"
        path.rename(folder / "checkpoint-1")
        (folder / "latest").write_text("checkpoint-1")
        # other metadata, of which the readable part is the same
        (folder / "checkpoint-1" / ".metadata").open("ab").write(b"of another checkpoint")

    def shortened(folder: Path) -> None:
        os.truncate(next(folder.rglob("__1_*.distcp")), 1)

    spoil: dict[str, Callable[[Path], object]] = {
        r"rank 1: .*expected a complete checkpoint.* no file '__2_0.distcp'": lambda folder: next(
            folder.rglob("__2_0.distcp")
        ).unlink(),
        r"rank 1: .*it has less than \d+ bytes of '__1_0.distcp'": shortened,
        "rank 1: no checkpoint in": lambda folder: (folder / "latest").unlink(),
        r"rank 1: .*no file 'extra.json'": lambda folder: next(folder.rglob("extra.json")).unlink(),
        r"rank 1: .*checkpoints/latest .*'\.metadata' cannot be read: .*Error": lambda folder: next(
            folder.rglob(".metadata")
        ).write_bytes(b"?"),
        "rank 1: .*holds another checkpoint than on the group's first rank": another,
    }
    for number, (said, change) in enumerate(spoil.items()):
        with turn(said=said), disk_of(world, f"copy{number}") as disk:
            shutil.copytree(origin / FOLDER, disk / FOLDER)
            found = block(0, world.rank)
            assert load_blocks(FOLDER, [found]) == {"steps": 4}  # complete copies are good
            assert found.values.item() == 10 + world.rank
            found.values.zero_()
            if world.rank == 1:
                change(FOLDER)
            with pytest.raises(ValueError, match=said):
                load_blocks(FOLDER, [found])
            assert found.values.item() == 0


def own_a_folder_that_cannot_be_made_is_refused_on_all_ranks(world):
    with disk_of(world, "file", shared=True):
        if world.rank == 0:
            FOLDER.write_text("a file")
        dist.barrier()
        with pytest.raises(ValueError, match=r"cannot save to checkpoints: .*Not a directory"):
            save_blocks(FOLDER, [block(1, world.rank)])


def own_values_that_are_not_json_are_refused_on_all_ranks(world):
    with disk_of(world, "values", shared=True):
        with pytest.raises(ValueError, match=r"rank 0: .*not JSON serializable"):
            save_blocks(FOLDER, [block(1, world.rank)], extra={"steps": torch.nn})
        save_blocks(FOLDER, [block(1, world.rank)])
