"""Ranks that are in different steps, have different batches or an error: all of them learn it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cases_in_turn import turn
from parallel.worlds.layout_training import sgd, small_shape, token_batches
from unisono.errors import AbortedError
from unisono.parallel import CrossEntropy, Layout, TransformerModel, parallelize
from unisono.parallel.run.step.step_agreement import batch_fingerprint

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)
WIDTH, SAMPLES, CLASSES = 6, 8, 4
LAYOUTS = (("dp=2", 1), ("dp=2,zero=1", 2), ("dp=2,zero=3", 2), ("tp=2", 1), ("pp=2", 2))


def test_step_agreement(outcome):
    outcome.require_success()


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)).double()


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def a_run(text: str, microbatches: int, loss=None, make_model=model):
    return parallelize(
        make_model(),
        Layout.parse(text),
        loss=loss or nn.CrossEntropyLoss(),
        optimizer=sgd,
        microbatches=microbatches,
    )


def weights(run) -> list[torch.Tensor]:
    return copy.deepcopy([each.values.detach() for found in run.sets for each in found.held])


def require_refused(run, match: str, *batches: torch.Tensor, error=ValueError) -> None:
    """Fails unless a step raises an error with one line, and keeps the weights."""
    before = weights(run)
    with pytest.raises(error, match=match) as caught:
        run.step(*batches)
    assert "\n" not in str(caught.value)
    for a, b in zip(before, weights(run), strict=True):
        assert torch.equal(a, b)


def own_each_rank_passes_its_part(world):
    """Tests programs written for DistributedDataParallel, and unequal targets."""
    inputs, targets = batch()
    half = slice(world.rank, None, 2)
    other = targets.clone()
    other[-1] = (targets[-1] + world.rank) % CLASSES
    for text, microbatches in LAYOUTS:
        with turn(text=text):
            run = a_run(text, microbatches)
            match = "ranks 0 and 1 passed different batches to step"
            require_refused(run, match, inputs[half], targets[half])
            require_refused(run, match, inputs, other)
            # the same batch on all ranks trains
            whole, loss = model(), nn.CrossEntropyLoss()
            assert float(run.step(inputs, targets)) == pytest.approx(
                float(loss(whole(inputs), targets)), rel=1e-12
            )
            run.mesh.close()


def own_parts_of_unequal_lengths(world):
    inputs, targets = batch()
    count = 4 + 2 * world.rank
    for text, microbatches in LAYOUTS:
        with turn(text=text):
            run = a_run(text, microbatches)
            match = r"with shapes \(\(4, 6\), \(4,\)\) and \(\(6, 6\), \(6,\)\)"
            require_refused(run, match, inputs[:count], targets[:count])
            run.mesh.close()


def own_bad_batches_on_one_rank(world):
    """Tests batches that one rank refuses, in layouts whose passes have collectives too."""
    inputs, targets = batch()
    for text, microbatches in LAYOUTS:
        with turn(text=text):
            run = a_run(text, microbatches)
            own = world.rank == 1
            for bad, match in (
                ((inputs.tolist(), targets), "inputs: expected a tensor"),
                ((inputs, None), "targets: expected a tensor"),
            ):
                require_refused(run, match, *(bad if own else (inputs, targets)))
            with torch.set_grad_enabled(not own):
                require_refused(run, "outside of torch.no_grad", inputs, targets)
            run.step(inputs, targets)
            run.mesh.close()


def own_a_rank_that_caught_an_exception(world):
    """Tests a rank whose second step ended in an exception that only this rank caught."""
    run = a_run("dp=2", 1)
    run.step(*batch())
    if world.rank == 1:
        run._agreement.begin()  # as after a KeyboardInterrupt
    for step in (2, 3):
        match = f"rank 0 is in its step number {step} and rank 1 in its step number {step + 1}"
        require_refused(run, match, *batch())
    run.mesh.close()


class Failing(nn.Module):
    """Fails for inputs that are NaN."""

    def forward(self, x):
        if x.isnan().any():
            raise RuntimeError("a value\nis NaN")
        return x


def own_errors_of_one_rank(world):
    """Tests errors in the passes of one rank, or in its loss. The next step trains all ranks."""
    inputs, targets = batch()
    bad_targets, bad_inputs = targets.clone(), inputs.clone()
    bad_targets[-1], bad_inputs[-1, 0] = CLASSES + 3, torch.nan
    own = world.rank == 1
    other = "rank 1 could not take this step, so no rank changed its weights: "
    for text, microbatches in (*LAYOUTS[:3], LAYOUTS[4], ("pp=2,schedule=zbv", 4)):
        with turn(text=text):
            make_model = lambda: nn.Sequential(  # noqa: E731
                nn.Sequential(model(), nn.Identity()), *model_tail()
            )
            run = a_run(text, microbatches, make_model=make_model)
            last = own if "zbv" not in text else world.rank == 0
            match = other.replace("rank 1", "rank 0") if "zbv" in text else other
            require_refused(
                run,
                "out of bounds" if last else match + "IndexError: Target 7 is out of bounds",
                inputs,
                bad_targets,
                error=IndexError if last else RuntimeError,
            )
            run.step(inputs, targets)
            run.mesh.close()
    for text, microbatches in LAYOUTS[:2]:
        with turn(text=text):
            run = a_run(text, microbatches, make_model=lambda: nn.Sequential(Failing(), model()))
            run.step(inputs, targets)
            before = weights(run)
            with pytest.raises(RuntimeError) as caught:
                run.step(bad_inputs, targets)
            if not own:
                assert str(caught.value) == other + "RuntimeError: a value is NaN"
            assert all(torch.equal(a, b) for a, b in zip(before, weights(run), strict=True))
            run.step(inputs, targets)
            run.mesh.close()


def model_tail() -> list[nn.Module]:
    torch.manual_seed(4)
    return [nn.Linear(CLASSES, CLASSES).double(), nn.Tanh(), nn.Linear(CLASSES, CLASSES).double()]


def own_equal_batches_with_nan(world):
    inputs, targets = batch()
    inputs[2, 1] = torch.nan
    run = a_run("dp=2", 1)
    assert run.step(inputs, targets).isnan()
    run.mesh.close()
    shape = small_shape()
    tokens = [each[:, 1:] for each in token_batches(shape)[0]]  # not contiguous
    run = a_run("tp=2", 2, CrossEntropy(11), lambda: TransformerModel(shape, seed=1))
    run.step(*tokens)
    run.mesh.close()


def own_fingerprints(world):
    """Tests that any changed element, type, shape and order has another fingerprint."""
    generator = torch.Generator().manual_seed(2)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool,
                  torch.complex128, torch.uint8):  # fmt: skip
        x = torch.rand(6, 4, 5, generator=generator) * 9
        x = x > 4 if dtype == torch.bool else x.to(dtype)
        found = {batch_fingerprint([x]), batch_fingerprint([x.flip(0)])}
        found |= {batch_fingerprint([x.view(4, 6, 5)]), batch_fingerprint([x[1:]])}
        found |= {batch_fingerprint([x, x]), batch_fingerprint([x[:, :, 1:]])}
        assert batch_fingerprint([x.clone()]) == batch_fingerprint([x]) in found
        assert batch_fingerprint([x.mT.contiguous().mT]) == batch_fingerprint([x])
        raw = x.flatten().view(torch.uint8)
        for place in range(len(raw)):
            changed = raw.clone()
            changed[place] = 1 - changed[place] if dtype == torch.bool else changed[place] ^ 8
            found.add(batch_fingerprint([changed.view(dtype).view_as(x)]))
        assert len(found) == len(raw) + 6, dtype
    pairs = torch.rand(3, 5, dtype=torch.complex64)
    for lazy in (pairs.conj(), pairs.conj().imag, pairs.mT.conj()):
        assert batch_fingerprint([lazy]) == batch_fingerprint([lazy.resolve_conj().clone()])
    assert batch_fingerprint([pairs]) != batch_fingerprint([pairs.conj()])
    assert batch_fingerprint([torch.tensor(3)]) != batch_fingerprint([torch.tensor(4)])
    assert batch_fingerprint([torch.empty(0, 3)]) != batch_fingerprint([torch.empty(0, 4)])
    large = torch.rand(2**10, 2**8)  # 1 MiB
    others = [large.roll(1, 1), large[:-1], large + 1, large.flip(0), large.mT.contiguous()]
    assert len({batch_fingerprint([each]) for each in (large, large.clone(), *others)}) == 6

    def in_turns(each):
        return tuple(batch_fingerprint([each], turn) for turn in range(8))  # of 128 KiB

    changed = {in_turns(large)}
    for place in (0, 1, 333, 2**9, 2**10 - 2):
        swapped, other = large.clone(), large.clone()
        swapped[[place, place + 1]] = swapped[[place + 1, place]]
        other[place, 77] += 1
        changed |= {in_turns(swapped), in_turns(other)}
    assert len(changed) == 11
    row = torch.rand(1, 2**10).expand(2**14 + 2**12, -1)  # 80 MiB
    assert len({batch_fingerprint([each]) for each in (row, row.clone(), row[1:], row + 1)}) == 3


def own_errors_that_one_rank_catches(world):
    """Tests a rank that skips a step after an error in its passes, which ends the run."""
    inputs, targets = batch()
    bad = inputs.clone()
    bad[-1, 0] = torch.nan  # a sample of rank 1
    run = a_run(
        "dp=2,zero=3", 1, make_model=lambda: nn.Sequential(model(), Failing(), *model_tail())
    )
    run.step(inputs, targets)
    if world.rank == 1:
        with pytest.raises(RuntimeError, match="is NaN"):
            run.step(bad, targets)
        bad = inputs
    match = "rank 1 failed in step 2: RuntimeError: a value is NaN; this run has ended"
    require_refused(run, match, bad, targets, error=AbortedError)
    run.mesh.close()
