"""Checkpoints that a thread writes while training goes on, and its errors."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import distributed as dist

from cases_in_turn import turn
from parallel.worlds.test_checkpoint_extra import TEXT, a_run
from parallel.worlds.test_layout_checkpoint import shared_folder
from unisono.parallel.checkpoint import block_checkpoint

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
LAYOUTS = ("dp=4,zero=1", "dp=2,tp=2,zero=3", "dp=2,pp=2")


def test_async_saves(outcome):
    outcome.require_success()


def step(run, number: int) -> float:
    tokens = TEXT[8 * number : 8 * number + 8]
    return float(run.step(tokens[:, :-1], tokens[:, 1:]))


class Thread:
    """The thread that writes, under the control of a test: it waits, and may fail."""

    def __init__(self, patch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.may_write = threading.Event()
        before = block_checkpoint._SavePlanner.resolve_data

        def resolve(planner, item):
            assert self.may_write.wait(60)
            if error is not None:
                raise error
            return before(planner, item)

        patch.setattr(block_checkpoint._SavePlanner, "resolve_data", resolve)


def own_steps_go_on_while_a_thread_writes(world):
    for text in LAYOUTS:
        with turn(text=text), pytest.MonkeyPatch.context() as patch:
            folder, run = shared_folder(), a_run(text)
            live = torch.ones(2)
            step(run, 0)
            thread = Thread(patch)
            pending = run.async_save(folder, {"live": live})
            live.zero_()
            expected = [step(run, 1), step(run, 2)]
            assert not pending.done() and not (folder / "latest").exists()
            dist.barrier()
            thread.may_write.set()
            pending.wait()
            assert pending.done() and (folder / "latest").read_text() == pending.path.name
            other = a_run(text)
            assert other.load(folder)["live"].tolist() == [1, 1] and other.steps == 1
            assert [step(other, 1), step(other, 2)] == expected
            assert 0 < pending.blocked_s < 60
            run.mesh.close()
            other.mesh.close()


def own_each_value_is_copied_by_one_rank(world):
    folder, run = shared_folder(), a_run("dp=4")
    step(run, 0)
    copied = []
    with pytest.MonkeyPatch.context() as patch:
        before = block_checkpoint._held

        def held(blocks):
            copied.extend((each.name, each.start, each.values.nbytes) for each in blocks)
            return before(blocks)

        patch.setattr(block_checkpoint, "_held", held)
        run.async_save(folder).wait()
    ranks = [None] * RANKS
    dist.all_gather_object(ranks, copied)
    every = [each for rank in ranks for each in rank]
    assert len({(name, start) for name, start, _ in every}) == len(every)
    bytes_of_ranks = [sum(nbytes for *_, nbytes in rank) for rank in ranks]
    largest = max(nbytes for *_, nbytes in every)
    assert max(bytes_of_ranks) - min(bytes_of_ranks) <= largest
    run.load(folder)
    run.mesh.close()


def own_the_next_call_of_any_kind_raises_an_error_of_the_thread_on_all_ranks(world):
    for text in LAYOUTS:
        with turn(text=text):
            require_told(world, text)


def require_told(world, text: str) -> None:
    folder, run = shared_folder(), a_run(text)
    step(run, 0)
    run.save(folder)
    expected = step(run, 1)
    run.load(folder)
    for name, call in (
        ("step", lambda: step(run, 2)),
        ("evaluate", lambda: run.evaluate(TEXT[:8, :-1], TEXT[:8, 1:])),
        ("save", lambda: run.save(folder)),
        ("async_save", lambda: run.async_save(folder)),
        ("load", lambda: run.load(folder)),
    ):
        with turn(call=name):
            fail_on_rank_2(world, run, folder)
            said = r"asynchronous save to .* failed: OSError: rank 2 could not write .*No space"
            with pytest.raises(RuntimeError, match=said):
                call()
            assert run.steps == 1
    assert step(run, 1) == expected  # raises nothing more, and no weights have changed
    run.load(folder)
    assert step(run, 1) == expected
    run.mesh.close()


def fail_on_rank_2(world, run, folder, *, is_known=lambda rank: True):
    """Saves with a thread that fails on rank 2, and waits for its end on ranks that know it."""
    with pytest.MonkeyPatch.context() as patch:
        error = OSError(28, "No space left on device") if world.rank == 2 else None
        thread = Thread(patch, error)
        pending = run.async_save(folder)
        thread.may_write.set()
        pending.join()
    if not is_known(world.rank):
        pending.done = lambda: False
    dist.barrier()
    return pending


def own_an_error_is_told_once_although_ranks_see_it_at_different_times(world):
    for known in ((0,), (2, 3)):
        folder, run = shared_folder(), a_run("dp=2,tp=2")
        fail_on_rank_2(world, run, folder, is_known=lambda rank, known=known: rank in known)
        with turn(known=known):
            with pytest.raises(RuntimeError, match=r"asynchronous save to .* failed"):
                step(run, 0)
            step(run, 0)
            run.save(folder)
        run.mesh.close()


def own_ranks_that_wait_and_ranks_that_do_not_agree(world):
    folder, run = shared_folder(), a_run("dp=4")
    pending = fail_on_rank_2(world, run, folder)
    if world.rank == 1:
        with pytest.raises(RuntimeError, match=r"asynchronous save to .* failed"):
            pending.wait()
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"asynchronous save to .* failed"):
        run.save(folder)
    run.save(folder)
    pending = fail_on_rank_2(world, run, folder)
    with pytest.raises(RuntimeError, match=r"asynchronous save to .* failed"):
        pending.wait()
    step(run, 0)
    run.mesh.close()


def own_a_closed_mesh_has_written_its_checkpoint(world):
    folder, run = shared_folder(), a_run("dp=2,pp=2")
    run.async_save(folder, keep=2)
    run.async_save(folder, keep=2)
    run.mesh.close()
    assert len(list(folder.glob("checkpoint-*"))) == 2
    other = a_run("dp=2,pp=2")
    other.load(folder)
    other.mesh.close()
