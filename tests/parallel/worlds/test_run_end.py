"""Errors of one rank in passes whose collectives other ranks wait in: all ranks learn the cause at
once, and the run takes no further step.
"""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn

from cases_in_turn import turn
from parallel.worlds.layout_training import expert_shape, sgd, small_shape
from parallel.worlds.test_divided_use import SomeExperts
from unisono.errors import AbortedError
from unisono.parallel import CrossEntropy, Layout, TransformerModel, parallelize

pytestmark = pytest.mark.torch
RANKS = 4
BACKENDS = ("unisono",)
FAILING = 2
LAYOUTS = (
    "dp=2,tp=2",
    "dp=2,cp=2",
    "dp=4,zero=3",
    "dp=4,zero=2",
    "dp=2,pp=2,zero=3",
    "tp=2,pp=2",
    "cp=2,pp=2,schedule=zb1p",
    "dp=2,pp=2,ep=2",
)


def test_run_end(outcome):
    outcome.require_success()


def model(text: str) -> nn.Module:
    changes = expert_shape(layers=4, dense_layers=0) if "ep=" in text else {"tied": False}
    return TransformerModel(small_shape(**{"layers": 4} | changes), seed=1)


def a_run(text: str):
    layout = Layout.parse(text)
    return parallelize(
        model(text), layout, loss=CrossEntropy(11), optimizer=sgd, microbatches=2 * layout.pp
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 11, (32, 9), generator=torch.Generator().manual_seed(2))
    return tokens[:, :8], tokens[:, 1:]


class Strike:
    """A hook of a module that raises an error in the second step of one rank."""

    def __init__(self, run, error: BaseException) -> None:
        self.run, self.error = run, error

    def __call__(self, *_: object) -> None:
        if self.run.steps == 1:
            raise self.error


def arm(run, place: str, error: BaseException) -> None:
    strike, stage = Strike(run, error), run.stages[0][1]
    norms = [each for each in stage.modules() if "Norm" in type(each).__name__]
    if place == "forward":
        norms[-1].register_forward_hook(strike)
    elif place == "backward":
        norms[-1].register_full_backward_hook(strike)
    else:
        run.optimizer.register_step_pre_hook(strike)


def require_end(run, rank: int, error: Exception, others: type[Exception]) -> None:
    """Fails unless a step raises the error on its rank, and a description elsewhere."""
    verb = "refused" if others is ValueError else "failed in"
    with pytest.raises((type(error), others)) as caught:
        run.step(*batch())
    if rank == FAILING:
        assert caught.value is error
    else:
        assert type(caught.value) is others
        assert f"rank {FAILING} {verb} step 2: " in str(caught.value), caught.value
        assert "the value is odd" in str(caught.value)
        assert "\n" not in str(caught.value)
    for act in (lambda: run.step(*batch()), run.report, lambda: run.save("unused")):
        with pytest.raises(AbortedError, match=f"rank {FAILING} .*; this run has ended: ") as later:
            act()
        assert "\n" not in str(later.value)


def own_errors_of_one_rank_in_passes(world):
    for text in LAYOUTS:
        for place in ("forward", "backward"):
            with turn(text=text, place=place):
                run = a_run(text)
                run.step(*batch())
                error = TypeError("the value\nis odd")
                if world.rank == FAILING:
                    arm(run, place, error)
                require_end(run, world.rank, error, AbortedError)
                run.mesh.close()
                dist.barrier()  # torch's default group still works


def own_refusals_and_interrupts(world):
    for text in ("dp=2,tp=2", "dp=4", "tp=2,pp=2"):
        with turn(text=text):
            run = a_run(text)
            run.step(*batch())
            error = ValueError("the value is odd")
            if world.rank == FAILING:
                arm(run, "optimizer", error)
            with pytest.raises((ValueError, AbortedError)) as caught:
                run.step(*batch())
                assert world.rank != FAILING  # the weights of the others have changed already
                run.step(*batch())
            if world.rank == FAILING:
                assert caught.value is error
            else:
                match = f"rank {FAILING} refused step 2: the value is odd; this run has ended"
                assert match in str(caught.value)
            run.mesh.close()
    for text in ("dp=4", "dp=2,pp=2"):
        with turn(text=text):
            run = a_run(text)
            run.step(*batch())
            error = KeyboardInterrupt("the value is odd")
            if world.rank == FAILING:
                arm(run, "forward", error)
            require_end(run, world.rank, error, AbortedError)
            run.mesh.close()


def own_other_calls_after_the_end(world):
    """Tests calls of ranks that have finished the step in which one rank ended the run."""
    for name in ("save", "report", "passes"):
        with turn(call=name):
            run = a_run("dp=4")
            run.step(*batch())
            if world.rank == FAILING:
                arm(run, "optimizer", TypeError("the value is odd"))
                with pytest.raises(TypeError):
                    run.step(*batch())
            else:
                run.step(*batch())
                call = getattr(run, name)
                with pytest.raises(AbortedError, match=f"rank {FAILING} failed in step 2: "):
                    call("unused") if name == "save" else call()
            run.mesh.close()
            dist.barrier()


def own_a_new_run_after_the_end(world):
    """Tests that the same process group trains a new run to the losses of an undisturbed one."""
    text = "tp=2,pp=2"
    undisturbed = a_run(text)
    losses = [float(undisturbed.step(*batch())) for _ in range(2)]
    undisturbed.mesh.close()
    run = a_run(text)
    run.step(*batch())
    error = RuntimeError("the value is odd")
    if world.rank == FAILING:
        arm(run, "forward", error)
    require_end(run, world.rank, error, AbortedError)
    run.mesh.close()
    again = a_run(text)
    assert [float(again.step(*batch())) for _ in range(2)] == losses
    again.mesh.close()


def own_experts_that_one_of_four_ranks_calls(world):
    """Tests that ranks of other groups of `ep` learn the cause, too."""
    torch.set_default_dtype(torch.float64)
    tokens = torch.ones(8, 5, dtype=torch.int64)
    tokens[2:4] = 0  # the samples of rank 1
    for text in ("dp=4,ep=2", "dp=4,ep=2,zero=1", "dp=4,ep=2,zero=3"):
        with turn(text=text):
            layout = Layout.parse(text)
            run = parallelize(SomeExperts(), layout, loss=CrossEntropy(11), optimizer=sgd)
            with pytest.raises(ValueError, match="call the layers of experts on all") as caught:
                run.step(tokens, tokens)
            assert "\n" not in str(caught.value)
            run.mesh.close()
