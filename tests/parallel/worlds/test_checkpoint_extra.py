"""What a program adds to a checkpoint: schedulers, data loaders, averages of weights, values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist

from cases_in_turn import turn
from parallel.worlds.layout_training import small_shape
from parallel.worlds.test_layout_checkpoint import shared_folder
from unisono.parallel import CrossEntropy, Layout, ParallelRun, TransformerModel, parallelize

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    StatefulDataLoader = None

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
SHAPE = small_shape(layers=2, positions=6)
TEXT = (torch.arange(64 * 7) * 5 % 11).reshape(64, 7)


def test_checkpoint_extra(outcome):
    outcome.require_success()


class Loader:
    """An endless loader that draws samples in a random order."""

    def __init__(self, samples: torch.Tensor, count: int, seed: int) -> None:
        self.samples, self.count = samples, count
        self.generator = torch.Generator().manual_seed(seed)
        self.order: list[int] = []

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> torch.Tensor:
        if len(self.order) < self.count:
            self.order = torch.randperm(len(self.samples), generator=self.generator).tolist()
        taken, self.order = self.order[: self.count], self.order[self.count :]
        return self.samples[taken]

    def state_dict(self) -> dict[str, object]:
        return {"order": self.order, "generator": self.generator.get_state()}

    def load_state_dict(self, state) -> None:
        self.order = state["order"]
        self.generator.set_state(state["generator"])


class Average:
    """An average of the weights of this rank."""

    def __init__(self, run: ParallelRun) -> None:
        self.live = {
            name: each for _, stage in run.stages for name, each in stage.named_parameters()
        }
        self.mean = {name: each.detach().clone() for name, each in self.live.items()}

    @torch.no_grad()
    def update(self) -> None:
        for name, each in self.mean.items():
            each.lerp_(self.live[name], 0.25)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.mean

    def load_state_dict(self, state) -> None:
        with torch.no_grad():
            for name, each in self.mean.items():
                each.copy_(state[name])


def a_run(text: str, batch: str = "global") -> ParallelRun:
    return parallelize(
        TransformerModel(SHAPE, seed=1, dropout=0.1),
        Layout.parse(text),
        loss=CrossEntropy(SHAPE.vocab),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        microbatches=2,
        clip=0.5,
        batch=batch,
    )


class Training:
    """A run with a scheduler, a loader for each rank of dp, and an average of the weights."""

    def __init__(self, text: str, make_loader) -> None:
        self.run = a_run(text, batch="local")
        own = TEXT[self.run.data_parallel_rank :: self.run.data_parallel_size]
        loader = make_loader(own, 4, 10 + self.run.data_parallel_rank)
        schedule = torch.optim.lr_scheduler.MultiStepLR(self.run.optimizer, [2, 4], 0.5)
        self.extra = {"loader": loader, "schedule": schedule, "average": Average(self.run)}
        self.batches = iter(loader)

    def losses(self, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            tokens = next(self.batches)
            found.append(float(self.run.step(tokens[:, :-1], tokens[:, 1:])))
            self.extra["schedule"].step()
            self.extra["average"].update()
        return found


def torchdata_loader(samples, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return StatefulDataLoader(samples, count, shuffle=True, generator=generator)


def own_a_restart_equals_a_training_that_was_not_interrupted(world):
    loaders = [Loader] if StatefulDataLoader is None else [Loader, torchdata_loader]
    cases = [(text, Loader) for text in ("dp=4,zero=1", "dp=2,tp=2", "dp=2,pp=2", "dp=4,zero=3")]
    cases += [("dp=4", each) for each in loaders]
    for text, loader in cases:
        with turn(text=text, loader=loader.__name__):
            folder = shared_folder()
            whole = Training(text, loader)
            expected = whole.losses(2)
            whole.run.save(folder, extra=whole.extra)
            expected += whole.losses(2)
            fresh = Training(text, loader)
            returned = fresh.run.load(folder, extra=fresh.extra)
            fresh.batches = iter(fresh.extra["loader"])
            assert returned == fresh.extra
            assert fresh.run.steps == 2
            assert fresh.losses(2) == expected[2:]
            means = (each.extra["average"].mean.values() for each in (whole, fresh))
            for left, right in zip(*means, strict=True):
                assert type(left) is type(right)
                assert torch.equal(*map(local, (left, right)))
            whole.run.mesh.close()
            fresh.run.mesh.close()


def local(each):
    return each.to_local() if hasattr(each, "to_local") else each


def own_values_by_rank_and_for_all(world):
    folder, rank = shared_folder(), world.rank
    run = a_run("dp=2,tp=2")
    common = {"epoch": 3, "best": float("inf"), "weights": torch.arange(3.0), "none": None}
    mine = {"place": np.array([run.data_parallel_rank]), "seed": torch.tensor([rank])}
    given = {**common, **mine, "reader": "text" if rank == 2 else None}
    run.save(folder, given)
    found = run.load(folder)
    assert found.keys() == given.keys()
    assert [found["epoch"], found["best"], found["none"]] == [3, float("inf"), None]
    assert torch.equal(found["weights"], common["weights"]) and found["reader"] == "text"
    assert int(found["seed"]) == rank and found["place"].tolist() == [run.data_parallel_rank]
    buffer = torch.zeros(3)
    assert run.load(folder, {"weights": buffer, "epoch": 0})["weights"] is buffer
    assert torch.equal(buffer, common["weights"])
    run.mesh.close()
    other = a_run("dp=2,pp=2")
    left_out = other.load(folder, {"seed": None})
    assert left_out.keys() == given.keys() - {"seed"}
    assert left_out["place"].tolist() == [other.data_parallel_rank]
    assert left_out["epoch"] == 3
    said = r"extra\['seed'\]: has a state for each rank of dp2 tp2"
    with pytest.raises(ValueError, match=said):
        other.load(folder)
    other.mesh.close()
    last = a_run("dp=4")
    with pytest.raises(ValueError, match=r"each of 2 data-parallel ranks, but dp4 has 4; load it"):
        last.load(folder, {"seed": None})
    assert last.load(folder, {"seed": None, "place": None})["epoch"] == 3
    last.mesh.close()


def own_a_refused_load_changes_nothing(world):
    folder, rank = shared_folder(), world.rank
    run = a_run("dp=4,zero=1")

    class Broken(Loader):
        def load_state_dict(self, state):
            if rank == 3:
                raise KeyError("order")
            super().load_state_dict(state)

    run.step(TEXT[:8, :-1], TEXT[:8, 1:])
    run.save(folder, {"loader": Loader(TEXT, 2, 0), "tensor": torch.ones(2), "count": 1})
    loss = float(run.step(TEXT[:8, :-1], TEXT[:8, 1:]))
    for extra, said in (
        ({"loader": Broken(TEXT, 2, 0)}, r"rank 3: KeyError: 'order'"),
        ({"other": 1} if rank == 2 else {}, r"extra: expected one of .*'loader'.*, got 'other'"),
        ({"tensor": torch.ones(3)}, r"extra\['tensor'\]: expected a tensor \(3,\), got \(2,\)"),
        ({"count": torch.ones(3)}, r"extra\['count'\]: expected a tensor \(3,\), got int"),
        ([1] if rank == 1 else {}, r"extra: expected a dictionary of values by name, got \[1\]"),
    ):
        with turn(said=said), pytest.raises(ValueError, match=said):
            run.load(folder, extra)
    assert run.steps == 2
    run.load(folder, {"loader": Loader(TEXT, 2, 0)})
    assert run.steps == 1
    assert float(run.step(TEXT[:8, :-1], TEXT[:8, 1:])) == loss
    run.mesh.close()


def own_values_that_cannot_be_saved_are_refused_on_all_ranks(world):
    folder, rank = shared_folder(), world.rank
    run = a_run("dp=4")

    class Fails(Loader):
        def state_dict(self):
            raise RuntimeError("in the middle\nof an epoch")

    for extra, keep, said in (
        ({"a": {"b": Path("x") if rank == 1 else 1}}, 1, r"rank 1: extra\['a'\]\['b'\]: expected"),
        (
            {"a": Fails(TEXT, 1, 0)} if rank == 2 else {},
            1,
            "rank 2: RuntimeError: in the middle of",
        ),
        ({1: 2}, 1, "extra: expected a dictionary of values by name"),
        ("text", 1, "extra: expected a dictionary of values by name"),
        (None, 0 if rank == 3 else 1, "rank 3: keep: expected a number of checkpoints, 1 or more"),
        (None, 1.5, "keep: expected a number of checkpoints, 1 or more, got 1.5"),
    ):
        for save in (run.save, run.async_save):
            with turn(said=said), pytest.raises(ValueError, match=said):
                save(folder, extra, keep=keep)
    assert not list(folder.iterdir())
    run.mesh.close()


def own_an_average_of_divided_weights_needs_the_same_layout(world):
    folder = shared_folder()
    run = a_run("dp=4,zero=3")
    run.save(folder, {"average": Average(run)})
    with pytest.raises(ValueError, match=r"pass the object whose state it is"):
        run.load(folder)
    run.mesh.close()
    other = a_run("dp=2,tp=2")
    with pytest.raises(ValueError, match=r"extra\['average'\]: has a state for each rank of dp4"):
        other.load(folder, {"average": Average(other)})
    other.mesh.close()


def own_a_folder_keeps_the_newest_complete_checkpoints(world):
    folder = shared_folder()
    run = a_run("dp=4")

    def save_after_a_step(keep):
        run.step(TEXT[:8, :-1], TEXT[:8, 1:])
        run.save(folder, {"step": run.steps}, keep=keep)

    def kept():
        return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))

    for expected in ([0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]):
        save_after_a_step(3)
        assert kept() == expected
    assert run.load(folder)["step"] == 5
    assert run.load(folder / "checkpoint-3")["step"] == run.steps == 4
    dist.barrier()
    if world.rank == 0:  # as a failing disk would, or an interrupted save
        (folder / "checkpoint-4" / "extra.json").unlink()
        (folder / "checkpoint-9").mkdir()
        (folder / "checkpoint-9" / "__0_0.distcp").touch()
    dist.barrier()
    with pytest.warns(UserWarning, match=r"no file 'extra.json'; checkpoint-3 is loaded in its pl"):
        assert run.load(folder)["step"] == 4
    dist.barrier()
    save_after_a_step(2)
    assert kept() == [3, 10]
    save_after_a_step(1)
    assert kept() == [11]
    run.mesh.close()
