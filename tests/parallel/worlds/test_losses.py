"""Losses of all kinds in parts of a batch: equal to one process, or refused on all ranks."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from cases_in_turn import turn
from parallel.worlds.layout_training import (
    compare_model,
    expert_shape,
    sgd,
    small_shape,
    token_batches,
)
from unisono.parallel import CrossEntropy, Layout, TransformerModel, parallelize
from unisono.parallel.layers import MixtureOfExperts

pytestmark = pytest.mark.torch
RANKS = 2
BACKENDS = ("unisono",)
WIDTH, CLASSES, SAMPLES = 6, 4, 8
LAYOUTS = (("dp=2", 1), ("dp=2", 3), ("dp=2,zero=3", 2), ("pp=2", 2))


def test_losses(outcome):
    outcome.require_success()


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES), nn.Identity()
    ).double()


def class_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns batches whose first samples are class 0 or -100, so that ranks have other counts."""
    generator = torch.Generator().manual_seed(8)
    found = []
    for step in range(3):
        inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
        targets = torch.randint(1, CLASSES, (SAMPLES,), generator=generator)
        targets[: 3 + 2 * (step == 1)] = -100 if step < 2 else 0  # the whole part of a rank
        targets[-1] = 0
        found.append((inputs, targets))
    return found


def real_batches(scale: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(9)
    draw = partial(torch.rand, generator=generator, dtype=torch.float64)
    return [(draw(SAMPLES, WIDTH) - 0.5, scale * draw(SAMPLES, CLASSES)) for _ in range(3)]


def signs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, (y > 0.5).double() * 2 - 1) for x, y in real_batches()]


CLASS_WEIGHTS = torch.tensor([0.3, 1.0, 2.5, 0.7], dtype=torch.float64)


def compare(make_loss, batches, layouts=LAYOUTS, make_model=model) -> None:
    for text, microbatches in layouts:
        with turn(text=text, microbatches=microbatches):
            if text == "pp=2" and len(batches[0][0]) % microbatches:
                continue
            compare_model(
                text,
                make_model,
                make_loss,
                batches,
                microbatches=microbatches,
                clip=0.01,
                unpredicted=("dp", "pp"),
            )


def own_means_over_valid_targets(world):
    for options in (
        {},
        {"ignore_index": 0},
        {"weight": CLASS_WEIGHTS},
        {"weight": CLASS_WEIGHTS, "ignore_index": 0, "label_smoothing": 0.1},
        {"reduction": "sum", "label_smoothing": 0.2},
    ):
        batches = [(x, y.where(y != -100, 0)) for x, y in class_batches()]
        if "ignore_index" not in options:
            batches = class_batches()
        with turn(**options):
            compare(lambda options=options: nn.CrossEntropyLoss(**options), batches)
            compare(
                lambda options=options: partial(functional.cross_entropy, **options),
                batches,
                LAYOUTS[1:2],
            )
    compare(CrossEntropy, class_batches())


def own_losses_of_torch(world):
    log_probabilities = nn.LogSoftmax(-1)
    probabilities = nn.Sigmoid()

    def with_last(last):
        return lambda: nn.Sequential(*model(), last)

    classes = [(x, y.where(y != -100, 1)) for x, y in class_batches()]
    distributions = [(x, y / y.sum(1, keepdim=True)) for x, y in real_batches()]
    ids = [(x, torch.tensor([[2, 0, -1, 1]] * SAMPLES)) for x, _ in real_batches()]
    for make_loss, batches, last in (
        (nn.MSELoss, real_batches(), None),
        (lambda: nn.MSELoss(reduction="sum"), real_batches(), None),
        (lambda: functional.l1_loss, real_batches(), None),
        (lambda: nn.SmoothL1Loss(beta=0.3), real_batches(), None),
        (lambda: partial(functional.huber_loss, delta=0.2), real_batches(), None),
        (nn.BCEWithLogitsLoss, real_batches(), None),
        (lambda: nn.BCEWithLogitsLoss(CLASS_WEIGHTS, pos_weight=CLASS_WEIGHTS),
         real_batches(), None),
        (lambda: nn.BCELoss(CLASS_WEIGHTS), real_batches(), probabilities),
        (lambda: nn.NLLLoss(CLASS_WEIGHTS), class_batches(), log_probabilities),
        (lambda: nn.KLDivLoss(reduction="batchmean"), distributions, log_probabilities),
        (lambda: nn.KLDivLoss(reduction="mean"), distributions, log_probabilities),
        (lambda: nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.1), distributions, None),
        (nn.PoissonNLLLoss, real_batches(), None),
        (nn.SoftMarginLoss, signs(), None),
        (nn.HingeEmbeddingLoss, signs(), None),
        (lambda: nn.MultiMarginLoss(p=2, weight=CLASS_WEIGHTS), classes, None),
        (nn.MultiLabelMarginLoss, ids, None),
        (lambda: nn.MultiLabelSoftMarginLoss(CLASS_WEIGHTS), real_batches(), None),
    ):  # fmt: skip
        with turn(loss=make_loss()):
            make_model = model if last is None else with_last(last)
            compare(make_loss, batches, LAYOUTS[1:2], make_model)


class Masked(nn.Module):
    """A loss over the elements of a mask in the targets, of which a part may have none."""

    def __init__(self, returns_numbers: bool) -> None:
        super().__init__()
        self.returns_numbers = returns_numbers

    def forward(self, output, targets):
        mask = targets > 0.6
        if self.returns_numbers and not mask.any():
            return 0.0, 0
        return ((output - targets) ** 2)[mask].sum(), mask.sum()


def alone(loss):
    """Returns a loss whose pair (sum, weight) is divided, as in one process."""

    def mean(output, targets):
        total, weight = loss(output, targets)
        return total / weight

    return mean


def own_pairs_of_sum_and_weight(world):
    batches = real_batches()
    for _, targets in batches:
        targets[:3] /= 2  # without elements of the mask
    for text, microbatches in (*LAYOUTS, ("dp=1,tp=2", 2), ("pp=2,schedule=zbv", 4)):
        with turn(text=text, microbatches=microbatches):
            layers = 4 if "tp" not in text else 1

            def deep(layers=layers):
                return nn.Sequential(
                    *(each for _ in range(layers) for each in wide_pair()), model()
                )

            compare_pair(text, deep, Masked(returns_numbers=False), batches, microbatches)


def wide_pair():
    torch.manual_seed(5)
    return nn.Linear(WIDTH, 8).double(), nn.Tanh(), nn.Linear(8, WIDTH).double()


def compare_pair(text, make_model, loss, batches, microbatches):
    torch.set_default_dtype(torch.float64)
    whole = make_model()
    optimizer = sgd(list(whole.parameters()))
    run = parallelize(
        make_model(), Layout.parse(text), loss=loss, optimizer=sgd, microbatches=microbatches,
        clip=0.1,
    )  # fmt: skip
    for inputs, targets in batches:
        optimizer.zero_grad()
        expected = alone(loss)(whole(inputs), targets)
        expected.backward()
        norm = float(nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
        optimizer.step()
        assert float(run.step(inputs, targets)) == pytest.approx(
            float(expected.detach()), rel=1e-12
        )
        assert run.gradient_norm == pytest.approx(norm, rel=1e-12)
    run.mesh.close()


class Shifted(nn.Module):
    """Predicts the class of the next position; positions without a next one do not count."""

    def __init__(self):
        super().__init__()
        self.entropy = nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, logits, targets):
        return self.entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), targets[:, 1:].flatten())


def own_functions_that_return_the_loss_of_torch(world):
    """Tests functions whose parts are means, of which the run knows the sum and the weight."""
    shape = small_shape()
    batches = [(x, y.where(y != -100, 0)) for x, y in token_batches(shape)]

    def flat(logits, targets):
        return functional.cross_entropy(logits.flatten(0, 1), targets.view(-1), ignore_index=0)

    def moved(logits, targets):
        logits = functional.log_softmax(logits.permute(0, 2, 1), dim=1)
        return functional.nll_loss(logits, targets.long(), reduction="sum")

    for make_loss in (lambda: flat, lambda: moved, Shifted):
        for text, microbatches in (("dp=2", 1), ("dp=2", 3), ("pp=2", 2), ("tp=2", 2)):
            with turn(loss=make_loss(), text=text):
                compare_model(
                    text,
                    partial(TransformerModel, shape, seed=1),
                    make_loss,
                    batches,
                    microbatches=microbatches,
                )
    compare_model(
        "cp=2", partial(TransformerModel, shape, seed=1), lambda: flat, batches, microbatches=2
    )
    compare(lambda: of_named, real_batches(), LAYOUTS[1:2], Named)


def own_pairs_of_divided_sequences(world):
    """Tests functions that treat each position alone, and others, which cp = 2 cannot compute."""
    shape = small_shape()
    batches = [(x, y.where(y != -100, 0)) for x, y in token_batches(shape)]
    make_model = partial(TransformerModel, shape, seed=1)

    def masked(logits, targets):
        losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        mask = (targets.flatten() > 1) & ~(targets.flatten() == 4)
        return (losses * mask.double()).sum(), mask.sum()

    def shifted(logits, targets):
        losses = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="none"
        )
        return losses.sum(), losses.numel()

    for microbatches in (1, 2):
        compare_pair("cp=2", make_model, masked, batches, microbatches)
        compare_pair("dp=2", make_model, shifted, batches, microbatches)
    refused(
        shifted, "calls __getitem__, which may combine different positions", "cp=2",
        make_model=make_model, batch=batches[0],
    )  # fmt: skip


def of_named(output, targets):
    logits = output["logits"][..., :-1].contiguous()
    return functional.mse_loss(logits, targets[:, :-1].type_as(logits))


def refused(loss, match, text="dp=2", microbatches=1, make_model=model, batch=None):
    """Fails unless the first step raises `ValueError` with one line on all ranks."""
    torch.set_default_dtype(torch.float64)
    run = parallelize(
        make_model(), Layout.parse(text), loss=loss, optimizer=sgd, microbatches=microbatches
    )
    before = copy.deepcopy([each.values.detach() for found in run.sets for each in found.held])
    with pytest.raises(ValueError, match=match) as caught:
        run.step(*(batch or real_batches()[0]))
    assert "\n" not in str(caught.value)
    after = [each.values.detach() for found in run.sets for each in found.held]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    run.mesh.close()


def own_losses_that_cannot_be_known_are_refused(world):
    mse = functional.mse_loss
    unknown = (
        lambda output, targets: ((output - targets) ** 2).mean(),
        lambda output, targets: 2 * mse(output, targets),
        lambda output, targets: mse(output, targets) + 0.1 * output.square().mean(),
        lambda output, targets: mse(output - output.mean(), targets),
        lambda output, targets: mse(output[:1], targets[:1]),
        lambda output, targets: mse(output.T[1:], targets.T[1:]),
        lambda output, targets: mse(output, targets, reduction="none").mean(),
        lambda output, targets: mse(output, targets, weight=targets),
        lambda output, targets: mse(targets, output),
        lambda output, targets: mse(output, targets.detach().mul(1)),
        lambda output, targets: (mse(output, targets), mse(output, targets))[0],
        lambda output, targets: mse(output.view(1, -1), targets.view(1, -1)),
        lambda output, targets: mse(output, targets).add_(0.1),
        lambda output, targets: mse(output, targets).detach(),
    )
    for number, loss in enumerate(unknown):
        for text, microbatches in (("dp=2", 1), ("pp=2", 2)) if number < 2 else (("dp=2", 1),):
            with turn(number=number, text=text):
                refused(loss, r"return \(sum, weight\), for example", text, microbatches)
    refused(
        lambda output, targets: (output.sum(), output.square().sum()),
        "the weight of .sum, weight. depends on parameters",
    )
    refused(lambda output, targets: (output.sum().detach(), 2), "does not depend on the model's")
    wide = real_batches()[0][0], torch.rand(SAMPLES)
    for text, microbatches in (("dp=2", 1), ("pp=2", 2)):
        refused(nn.MSELoss(), "broadcast over samples", text, microbatches, batch=wide)
    with torch.no_grad():
        factors = torch.rand(SAMPLES, 1)
    refused(nn.BCEWithLogitsLoss(factors), "has factors for the samples of one batch")


def own_batches_without_valid_targets(world):
    """Tests that the loss is NaN and the gradients are zeros, as in torch."""
    inputs, targets = real_batches()[0]
    for text, microbatches in (("pp=2", 2), ("dp=2", 2)):
        with turn(text=text):
            run = parallelize(
                model(),
                Layout.parse(text),
                loss=lambda output, targets: (output.sum(), 0),
                optimizer=sgd,
                microbatches=microbatches,
            )
            before = [each.values.detach().clone() for found in run.sets for each in found.held]
            assert run.step(inputs, targets).isnan()
            assert run.gradient_norm == 0
            after = [each.values.detach() for found in run.sets for each in found.held]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            run.mesh.close()


def own_balance_losses_of_another_stage(world):
    """Tests a stage without experts that computes a loss of unknown weight."""
    shape = small_shape(**expert_shape())
    torch.manual_seed(1)
    layers = [MixtureOfExperts(shape), *(nn.Linear(shape.hidden, shape.hidden) for _ in range(9))]
    run = parallelize(
        nn.Sequential(*layers),
        Layout(pp=2),
        loss=lambda output, targets: ((output - targets).square().sum(), targets.numel()),
        optimizer=sgd,
        microbatches=2,
    )
    assert run._context.balanced if world.rank == 0 else not run._context.balanced
    values = torch.rand(8, 5, shape.hidden)
    with pytest.raises(ValueError, match="balance losses of experts need a loss whose weight"):
        run.step(values, values)
    run.mesh.close()


def own_parts_without_valid_targets(world):
    """Tests logits that are infinite or overflow, where no target of a part is valid."""

    class Reduced(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.inner, self.dtype = model(), dtype

        def forward(self, x):
            y = self.inner(x)
            mask = torch.zeros_like(y)
            mask[:, 1] = -torch.inf
            return y + mask if self.dtype is None else (4e4 * y.tanh()).to(self.dtype)

    batches = [(x, y.where(y != 1, 2)) for x, y in class_batches()]
    for microbatches in (1, 2):
        compare_model(
            "dp=2", lambda: Reduced(None), nn.CrossEntropyLoss, batches, microbatches=microbatches,
            clip=None,
        )  # fmt: skip
    run = parallelize(
        Reduced(torch.float16), Layout(dp=2), loss=nn.CrossEntropyLoss(), optimizer=sgd
    )
    with torch.no_grad():
        expected = nn.CrossEntropyLoss()(
            Reduced(torch.float16)(batches[0][0]).float(), batches[0][1]
        )
    assert float(run.step(*batches[0])) == pytest.approx(float(expected), rel=1e-3)
    run.mesh.close()
    whole = copy.deepcopy(model())
    run = parallelize(model(), Layout(dp=2), loss=nn.CrossEntropyLoss(), optimizer=sgd)
    nothing = torch.full((SAMPLES,), -100)
    assert nn.CrossEntropyLoss()(whole(batches[0][0]), nothing).isnan()
    assert run.step(batches[0][0], nothing).isnan()
    for name, each in run.stages[0][1].named_parameters():
        assert torch.equal(each, whole.get_parameter(name))  # as in torch, gradients are zeros
    run.mesh.close()


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model()

    def forward(self, x):
        return {"logits": self.inner(x), "nothing": None, "pair": (x, [x.square()])}


def own_outputs_that_are_no_tensor(world):
    batches = real_batches()
    for _, targets in batches:
        targets[:5] /= 2

    def loss(output, targets):
        mask = targets > 0.6
        return ((output["logits"] - targets) ** 2)[mask].sum(), mask.sum()

    class Numbers(Masked):
        def forward(self, output, targets):
            return super().forward(output["logits"], targets)

    for text, microbatches in (("dp=2", 1), ("dp=2", 3), ("dp=2,zero=3", 4)):
        with turn(text=text, microbatches=microbatches):
            compare_pair(text, Named, loss, batches, microbatches)
            compare_pair(text, Named, Numbers(returns_numbers=True), batches, microbatches)
    few = [(x[:3], y[:3] + 0.5) for x, y in batches]  # a microbatch of one rank is empty
    compare_pair("dp=2", Named, loss, few, 2)
    refused(nn.MSELoss(), "needs one tensor, but the model returned dict", make_model=Named)

    def from_other_samples(output, targets):
        return functional.mse_loss(output["logits"] + output["pair"][0].mean(), targets)

    refused(from_other_samples, "return .sum, weight., for example", make_model=Named)


def own_loss_of_the_caller_stays_unchanged(world):
    shape, loss = small_shape(), CrossEntropy(11)
    batches = token_batches(shape)
    before = dict(vars(loss))
    found = []
    for text in ("tp=2", "dp=2"):
        run = parallelize(
            TransformerModel(shape, seed=1), Layout.parse(text), loss=loss, optimizer=sgd
        )
        found.append(float(run.step(*batches[0])))
        run.mesh.close()
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert vars(loss) == before
